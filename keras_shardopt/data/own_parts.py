"""Which data is a process's own part already, and must not be divided once more."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from keras import tree

from keras_shardopt.data.arrays import BatchesOfArrays
from keras_shardopt.data.py_dataset import PartOfPyDataset
from keras_shardopt.data.tf_dataset import steps_of
from keras_shardopt.data.torch_loader import PartOfSampler, PartOfStream, samplers_of

# By identity: arrays compare element by element, and are not to be kept alive.
_parts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def noted(data: Any) -> Any:
    """The same data, of which each array or `tf.data` pipeline is known as an own part from now on."""
    for leaf in tree.flatten(data):
        if leaf is not None and type(leaf).__weakrefoffset__:
            _parts[id(leaf)] = leaf
    return data


def is_part(x: Any) -> bool:
    """Whether `shard_data` has returned this `PyDataset`, `DataLoader` or pipeline, perhaps before other steps."""
    parts = (BatchesOfArrays, PartOfPyDataset, PartOfSampler, PartOfStream)
    if any(isinstance(getattr(x, name, x), parts) for name in ("sampler", "batch_sampler", "dataset")):
        return True
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and hasattr(tensorflow, "data") and isinstance(x, tensorflow.data.Dataset):
        return any(_is_noted(step) for step in steps_of(x))
    return False


def is_own_part(*data: Any) -> bool:
    """Whether any of this, which goes together, is what `shard_data` has returned or a `DistributedSampler` divides."""
    return is_surely_divided(*data) or any(_has_distributed_sampler(each) for each in data)


def is_surely_divided(*data: Any) -> bool:
    """Whether it is what `shard_data` has returned. A `DistributedSampler` may have the same rank everywhere."""
    return any(is_part(each) for each in data) or any(_is_noted(leaf) for leaf in tree.flatten(data))


def _is_noted(leaf: Any) -> bool:
    return leaf is not None and _parts.get(id(leaf)) is leaf


def _has_distributed_sampler(x: Any) -> bool:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(x, torch_data.DataLoader):
        return False
    return any(isinstance(sampler, torch_data.DistributedSampler) for sampler in samplers_of(x))
