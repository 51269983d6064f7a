"""Rotary embedding of a model.

`parameters.py` reads config.json, `frequencies.py` has the formulas, and `angles.py` the angles of a step for torch.
The C library's tables are in models/on_library/rotary_table.py.
"""
