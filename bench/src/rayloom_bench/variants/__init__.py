"""Variants of this engine, such as layouts or forms of the weights, measured in alternating rounds over HTTP."""
