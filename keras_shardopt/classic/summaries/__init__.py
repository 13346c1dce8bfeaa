"""Summaries of updates, for TensorBoard."""
