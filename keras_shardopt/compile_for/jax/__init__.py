"""Compiles the training step with JAX: XLA's compilers for TPU and GPU need no such device."""
