"""Kernels that update variables in one pass over memory."""
