"""OpenAI's endpoints.

completions  POST /v1/completions; chat/ the same of chats; tokens, models
fields/      the request types, and what is said about a wrong field
prompts      messages and texts as token ids
answers/     whole answers, streams, log-probabilities, usage
"""
