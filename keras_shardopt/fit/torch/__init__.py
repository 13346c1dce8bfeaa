"""Training with Keras's torch trainer on several ranks."""

from keras_shardopt.fit.torch.trainer import prepare, step_one_by_one, train_separately

__all__ = ["prepare", "step_one_by_one", "train_separately"]
