"""POST /v1/chat/completions, and what Responses and Messages share with it: the prepared call, its message."""
