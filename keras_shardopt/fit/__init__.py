"""`model.fit` on several replicas, with one folder per backend.

Each backend has its own `TrainStep` base class, because each trainer of Keras calls a step differently.
`keras_shardopt.update.plugs.step_class` returns the base class, or the subclass that an extension registers for it.
"""

TRAINERS = {name: f"keras_shardopt.fit.{name}" for name in ("tensorflow", "jax", "torch")}
"""By backend, the package of its trainer; see `keras_shardopt.backends.for_backend`."""
