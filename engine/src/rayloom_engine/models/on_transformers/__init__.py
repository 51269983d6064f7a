"""Models that transformers implements: its modules on our paged attention, with weights that our loader places."""
