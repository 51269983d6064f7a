"""Parallelism: the part of a model that a rank has, and what ranks do together. The only user of torch.distributed."""
