"""Divided weights on PyTorch: the training step, the weights of an optimizer, and the gathering of their buckets."""

from keras_shardopt.extensions.sharded_weights.torch.step import ShardedStep

__all__ = ["ShardedStep"]
