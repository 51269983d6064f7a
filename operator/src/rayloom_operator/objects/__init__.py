"""Builders of the Kubernetes objects of an LLMService. Pure: equal inputs give equal bytes. Inputs are not changed."""
