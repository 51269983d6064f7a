"""The fields of requests: their types, checks and descriptions, and fields of other APIs."""
