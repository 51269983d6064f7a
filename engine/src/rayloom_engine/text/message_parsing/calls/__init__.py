"""Readers of a single tool call, one reader for each syntax. A reader either raises NoCall or starts a call."""
