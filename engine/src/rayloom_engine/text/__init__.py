"""Text on both sides of the model: tokens, chat templates, incremental text and stop strings. No HTTP and no torch."""
