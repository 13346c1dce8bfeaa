"""What the gradients of one update go through."""
