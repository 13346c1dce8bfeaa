"""Keras' torch trainer on several ranks."""

from keras_shardopt.fit.torch.trainer import prepare

__all__ = ["prepare"]
