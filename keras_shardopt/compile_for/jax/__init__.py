"""Compiles the training step with JAX. XLA's compilers for TPU and GPU do not need the device."""
