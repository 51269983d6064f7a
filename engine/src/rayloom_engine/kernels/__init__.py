"""Kernels: a folder for each operation of the model, with one file for each backend of the operation.

`<operation>/__init__.py` holds the signature, the formula and the choice of a backend. `reference.py` defines the
result, in plain torch and float32. The other files are faster backends. A rank calls `kernel_set.choose_kernels` once.
This function chooses a backend for every operation, and the model calls the chosen backends.
"""
