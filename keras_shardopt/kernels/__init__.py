"""Updates in one pass over memory, on backends with such kernels."""
