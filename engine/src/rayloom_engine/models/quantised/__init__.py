"""Checkpoints with quantised weights: what their configuration says, which tensors they have, and how to read these.

`scheme.py` has the scheme of a checkpoint, `read_scheme.py` reads it from config.json. Each other file has the readers
of one published format. All of it is pure, with numpy arrays.
"""
