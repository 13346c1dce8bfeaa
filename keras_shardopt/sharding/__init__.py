"""Optimizer state divided among replicas."""
