"""`model.fit` on several replicas, with one folder per backend."""

TRAINERS = {name: f"keras_shardopt.fit.{name}" for name in ("tensorflow", "jax", "torch")}
"""By backend, the package of its trainer; see `keras_shardopt.backends.for_backend`."""
