"""Recognizes data that `shard_data` or a `DistributedSampler` has already split among processes."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from keras import tree

from keras_shardopt.data.arrays import BatchesOfArrays
from keras_shardopt.data.py_dataset import PartOfPyDataset
from keras_shardopt.data.tf_dataset import steps_of
from keras_shardopt.data.torch_loader import PartOfSampler, PartOfStream, samplers_of

# The arrays and pipelines that `shard_data` has returned, by `id`, because NumPy arrays are not hashable. References
# are weak, so the entries do not keep data in memory.
_parts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def mark_as_split(data: Any) -> Any:
    """Marks each array or `tf.data` pipeline of `data` as split, and returns `data`."""
    for leaf in tree.flatten(data):
        if leaf is not None and type(leaf).__weakrefoffset__:
            _parts[id(leaf)] = leaf
    return data


def is_split_dataset(x: Any) -> bool:
    """Whether `x` is a dataset or `DataLoader` from `shard_data`, or a `tf.data` pipeline that reads from one."""
    parts = (BatchesOfArrays, PartOfPyDataset, PartOfSampler, PartOfStream)
    if any(isinstance(getattr(x, name, x), parts) for name in ("sampler", "batch_sampler", "dataset")):
        return True
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and hasattr(tensorflow, "data") and isinstance(x, tensorflow.data.Dataset):
        return any(_is_marked(step) for step in steps_of(x))
    return False


def is_split(*data: Any) -> bool:
    """Whether `shard_data` or a `DistributedSampler` has split any of these arguments (`x`, `y`, ...) of a call."""
    return is_from_shard_data(*data) or any(_has_distributed_sampler(each) for each in data)


def is_from_shard_data(*data: Any) -> bool:
    """Whether `shard_data` has returned any of these arguments (`x`, `y`, ...) of a call."""
    return any(is_split_dataset(each) for each in data) or any(_is_marked(leaf) for leaf in tree.flatten(data))


def _is_marked(leaf: Any) -> bool:
    return leaf is not None and _parts.get(id(leaf)) is leaf


def _has_distributed_sampler(x: Any) -> bool:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(x, torch_data.DataLoader):
        return False
    return any(isinstance(sampler, torch_data.DistributedSampler) for sampler in samplers_of(x))
