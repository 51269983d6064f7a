"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Both are answered by the same code as chats.
"""
