"""What can be plugged into an update, and what nothing else here knows of. Importing this registers all of it."""

from keras_shardopt.extensions import coding, equal_bits, local_sgd

__all__ = ["coding", "equal_bits", "local_sgd"]
