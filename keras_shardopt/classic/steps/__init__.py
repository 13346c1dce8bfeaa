"""`optimize_loss`: a compiled training step without `fit`."""
