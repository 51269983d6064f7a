"""Structured output: the form of an answer as a grammar, and the tokens that the grammar allows next.

compile.py writes the grammar as text, and validate.py lets the library llguidance check it. A sequence carries the text
to the rank that samples; there, matcher.py consumes the tokens of the answer. No other folder imports llguidance.
"""
