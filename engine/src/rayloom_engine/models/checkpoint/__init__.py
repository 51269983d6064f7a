"""Checkpoints: finding a model's files, and reading these untrusted files within limits."""
