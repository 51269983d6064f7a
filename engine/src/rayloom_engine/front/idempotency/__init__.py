"""A client that repeats its request after a broken connection gets the same answer, from its first token."""
