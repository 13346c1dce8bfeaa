"""Updates variables with PyTorch's fused kernels, or in pieces of arrays that fit into the CPU's cache."""
