"""JAX: the step is exported, and XLA's compilers for TPU and GPU compile it without the device."""
