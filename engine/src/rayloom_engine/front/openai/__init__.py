"""OpenAI's endpoints.

completions  POST /v1/completions; chat/ POST /v1/chat/completions; tokens, models
fields/      the request types, and the messages about wrong fields
prompts      turns messages and texts into token ids
answers/     whole answers, streams, log-probabilities, usage
"""
