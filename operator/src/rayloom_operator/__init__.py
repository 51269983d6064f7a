"""Rayloom's operator: from an LLMService manifest to a running engine."""

__version__ = "0.1.0"
