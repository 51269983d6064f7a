"""POST /v1/responses: OpenAI's Responses API without stored state. Requests are translated into chat requests."""
