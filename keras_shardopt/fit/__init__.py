"""What `model.fit` must learn to train with several replicas."""
