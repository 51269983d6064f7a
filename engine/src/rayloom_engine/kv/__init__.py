"""The KV cache of a rank: its layout in memory, and the number of its blocks."""
