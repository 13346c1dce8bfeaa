"""PyTorch's fused kernels, and Keras' updates in pieces that stay in the CPU's cache."""
