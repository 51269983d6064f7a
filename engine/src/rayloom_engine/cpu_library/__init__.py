"""The C library of the CPU backend (engine/csrc/cpu): how it is built, found, loaded and called.

`build.py` compiles it, `finding.py` finds the compiled file, `structures.py` mirrors the C header, `library.py` calls
the functions with numpy arrays (`arrays.py`), `memory.py` allocates the memory of packed weights. No torch here.
"""
