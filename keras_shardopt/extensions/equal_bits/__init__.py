"""Batches in a fixed number of parts: equal bits on any number of replicas."""

from keras_shardopt.backends import for_backend
from keras_shardopt.extensions.equal_bits.stage import VirtualReplicas
from keras_shardopt.update.plugs import Place, register_stage

register_stage(Place.OUTERMOST, VirtualReplicas)

# Where the backend's trainer gets a step in parts.
for_backend({name: f"keras_shardopt.extensions.equal_bits.{name}" for name in ("tensorflow", "torch", "jax")})
