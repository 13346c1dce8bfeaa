"""Training with `model.fit` on several replicas (devices or processes), with one folder per Keras backend.

In each folder, a class `TrainStep` runs one training step. Extensions of this package can replace the class.
"""

TRAINERS = {name: f"keras_shardopt.fit.{name}" for name in ("tensorflow", "jax", "torch")}
"""For each Keras backend, the module whose function `prepare` adapts a model to several replicas."""
