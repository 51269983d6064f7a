"""OpenAI's endpoints: typed requests, prompts, answers and streams."""
