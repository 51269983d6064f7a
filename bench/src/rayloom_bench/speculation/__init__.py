"""Speculation: tokens per second of CPU time with drafts and without."""
