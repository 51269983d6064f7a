"""OpenAI's endpoints: request types, prompts, answers and streams."""
