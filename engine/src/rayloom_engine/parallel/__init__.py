"""Parallelism: the part of a model that a rank holds, and how ranks communicate in a step."""
