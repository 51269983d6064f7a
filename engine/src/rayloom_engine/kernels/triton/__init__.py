"""The parts that Triton kernels share: the choice between them and other kernels, launch sizes, the type `Shipped`."""
