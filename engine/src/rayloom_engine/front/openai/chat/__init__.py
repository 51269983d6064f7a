"""POST /v1/chat/completions, and the parts of it that Responses and Messages use: prepared calls and messages."""
