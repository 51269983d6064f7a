"""The KV cache of a rank: its layout in memory, and how many blocks a rank gets."""
