"""One compiled training step, without `fit`."""
