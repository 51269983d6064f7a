"""A rank's part of a decoder on the C library, with numpy arrays. A process with only this package imports no torch.

`loader.py` reads the checkpoint into `weights.py`, `decoder.py` computes with it, `rotary_table.py` has the angles,
`support.py` says which models the library can compute.
"""
