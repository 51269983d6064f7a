"""The parts that Triton kernels share: the list of the configurations that are compiled ahead of time."""
