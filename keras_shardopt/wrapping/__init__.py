"""Optimizers that wrap another one."""
