"""Compares the gateway's choice of an engine with simpler ones, on real engines of this machine."""
