"""Parallelism: the part of a model that a rank has, and the communication of ranks.

No other package uses torch.distributed.
"""
