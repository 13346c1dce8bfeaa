"""Local SGD: each replica updates with its own gradients, and replicas average their weights after several updates."""

from keras_shardopt.extensions.local_sgd.settings import LocalSGD
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.update.options import register_settings
from keras_shardopt.update.plugs import register_step

__all__ = ["LocalSGD"]

register_settings(LocalSGD)
register_step(LocalUpdates.found_in, __name__, "LocalStep")
