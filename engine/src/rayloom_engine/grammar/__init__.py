"""Structured output: the form of an answer as a grammar, and the tokens that the grammar allows next.

compile.py writes the grammar as text, validate.py asks the library llguidance about it. The text travels with a
sequence to the rank that samples, and matcher.py follows it there. No other folder imports llguidance.
"""
