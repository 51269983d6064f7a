"""Parallelism: the part of a model that a rank holds, and communication of ranks in a step, by torch.distributed."""
