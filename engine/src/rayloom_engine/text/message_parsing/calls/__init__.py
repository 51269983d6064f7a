"""Readers of a single tool call, one for each syntax. A reader raises NoCall or starts a call, and never both."""
