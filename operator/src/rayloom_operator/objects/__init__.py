"""Builders of the objects that serve an LLMService. Pure: equal input gives equal bytes, and input is left alone."""
