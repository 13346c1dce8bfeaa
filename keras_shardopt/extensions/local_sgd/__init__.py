"""Replicas that train apart for some updates."""

from keras_shardopt.backends import for_backend
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.update.plugs import Place, register_stage

register_stage(Place.WINDOW, LocalUpdates)

# Where the backend's trainer gets a step of a round.
for_backend({name: f"keras_shardopt.extensions.local_sgd.{name}" for name in ("tensorflow", "torch", "jax")})
