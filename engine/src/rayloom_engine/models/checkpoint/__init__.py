"""Checkpoints: where a model's files come from, and how untrusted files are read within limits."""
