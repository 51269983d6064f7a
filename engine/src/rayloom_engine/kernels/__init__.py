"""Kernels: each operation of the model in a folder, with one file for each backend that implements it.

`<operation>/__init__.py` holds the signature, the formula and the choice of a backend; `reference.py` defines the
result in plain torch and float32; the other files are faster backends. `kernel_set.choose_kernels` makes the choice
for all operations once per rank, and the model calls the kernels of that choice.
"""
