"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Both endpoints translate a request into a chat request. The code of the chat endpoint then prepares it.
"""
