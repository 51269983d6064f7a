"""The parts that Triton kernels share: the choice of Triton, sizes of launches, the type of a checked configuration."""
