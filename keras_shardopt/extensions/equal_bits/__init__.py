"""`VirtualReplicas`: divides batches into a fixed number of parts, so any number of replicas has equal results."""

from keras_shardopt.extensions.equal_bits.num_parts import has_virtual_replicas
from keras_shardopt.extensions.equal_bits.settings import VirtualReplicas
from keras_shardopt.update.options import register_settings
from keras_shardopt.update.plugs import register_step

__all__ = ["VirtualReplicas"]

register_settings(VirtualReplicas)
register_step(has_virtual_replicas, __name__, "PartsStep")
