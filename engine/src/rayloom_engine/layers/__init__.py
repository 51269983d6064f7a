"""Layers: attention, MLP and linear layers of a decoder, put together from kernels and weight schemes."""
