"""Text before and after the model: tokenizer, chat templates, incremental text and stop strings. No HTTP, no torch."""
