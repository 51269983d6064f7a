"""Greedy answers of the engines, compared with those of transformers in float32."""
