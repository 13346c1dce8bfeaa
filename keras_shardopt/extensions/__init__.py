"""Optional features that change an update of `CrossShard`. Importing this package registers them."""

from keras_shardopt.extensions import coding, equal_bits, local_sgd, noise

__all__ = ["coding", "equal_bits", "local_sgd", "noise"]
