"""Rotary embedding of a model: `parameters.py` what config.json says, `frequencies.py` the formulas, `angles.py` the
angles of a step for torch. The C library's tables are in models/on_library/rotary_table.py.
"""
