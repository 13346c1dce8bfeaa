"""What happens inside updates, for TensorBoard."""
