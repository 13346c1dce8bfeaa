"""Fused kernels of PyTorch, and Keras' updates in pieces that stay in the CPU's cache."""
