"""The choice of an engine for each request. Pure."""
