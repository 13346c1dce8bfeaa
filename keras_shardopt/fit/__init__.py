"""`model.fit` on several replicas, with one folder per backend.

Each folder has a base class `TrainStep`, because Keras's trainer of each backend calls a training step differently.
`keras_shardopt.update.plugs.step_class` returns the base class, or the subclass that an extension registers for it.
"""

TRAINERS = {name: f"keras_shardopt.fit.{name}" for name in ("tensorflow", "jax", "torch")}
"""The package that trains on each backend; see `keras_shardopt.backends.for_backend`."""
