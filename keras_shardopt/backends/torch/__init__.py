"""The PyTorch backend: replicas are ranks of `torch.distributed`."""

from keras_shardopt.backends.torch import placement, processes, runtime

__all__ = ["placement", "processes", "runtime"]
