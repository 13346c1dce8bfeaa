"""JAX exports the step, and XLA's compilers for TPU and GPU compile it without the device."""
