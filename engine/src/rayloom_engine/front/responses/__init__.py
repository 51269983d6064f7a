"""POST /v1/responses: OpenAI's Responses API without state, answered by the generation path of chats."""
