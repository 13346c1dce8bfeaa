"""Who owns which part of the optimizer state."""
