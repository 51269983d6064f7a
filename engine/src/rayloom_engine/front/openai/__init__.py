"""OpenAI's endpoints.

completions  POST /v1/completions
chat/        POST /v1/chat/completions
tokens       POST /tokenize and /detokenize, GET /tokenizer_info
models       GET /v1/models
adapters     POST /v1/load_lora_adapter and /v1/unload_lora_adapter
fields/      the request types, and the messages about wrong fields
prompts      turns messages and texts into token ids
answers/     whole answers, streams, log-probabilities, usage
"""
