"""Checkpoints with quantised weights: their configuration, their tensors, and the readers of these tensors.

`scheme.py` has the scheme of a checkpoint, `read_scheme.py` reads it from config.json. Each other file has the readers
of one published format. All files are pure and use numpy arrays.
"""
