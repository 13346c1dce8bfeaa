"""What `model.fit` needs in order to train with several replicas."""

TRAINERS = {name: f"keras_shardopt.fit.{name}" for name in ("tensorflow", "jax", "torch")}
"""By backend, the module that changes its trainer; see `keras_shardopt.backends.for_backend`."""
