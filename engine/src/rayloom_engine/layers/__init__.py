"""Layers: attention, MLP and linear layers of a decoder, built from kernels and weight schemes."""
