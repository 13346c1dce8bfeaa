"""Optional features of `CrossShard`, such as gradient compression. Importing this package registers the features."""

from keras_shardopt.extensions import coding, equal_bits, local_sgd, noise, sharded_weights

__all__ = ["coding", "equal_bits", "local_sgd", "noise", "sharded_weights"]
