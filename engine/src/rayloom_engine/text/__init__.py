"""From text to tokens and back: tokenizer, chat templates, incremental decoding, stop strings. No HTTP, no torch."""
