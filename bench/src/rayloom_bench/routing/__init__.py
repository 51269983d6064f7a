"""Compares the gateway's choice of an engine with simpler policies, on real engines of this machine."""
