"""Rayloom's operator: from an LLMService manifest to a running engine."""
