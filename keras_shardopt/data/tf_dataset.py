"""Selects this process's part of a `tf.data.Dataset`.

Private names of TensorFlow touched here (test_data.py checks that each exists):
    `Dataset._inputs`, `_seed`, `_seed2`, `_deterministic`, `_map_func` - how a `tf.data` pipeline orders its elements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from keras_shardopt.data.part import Part


def part_of_tf_dataset(dataset: Any, shuffle: bool, seed: int, part: Part) -> Any:
    """Returns a dataset of this process's elements. Each process computes all elements, but keeps only its own."""
    del seed
    if shuffle:
        raise ValueError(
            "`shuffle` is not for a `tf.data.Dataset`. Received: shuffle=True. Use `dataset.shuffle(buffer_size, "
            "seed=...)` before `.batch(...)`, with the same seed on every process."
        )
    tf = sys.modules["tensorflow"]
    _check_same_order(tf, dataset)
    cardinality = int(dataset.cardinality())
    if cardinality >= 0:
        part.check_enough(cardinality, "elements")
    options = tf.data.Options()
    options.deterministic = True
    # Turn off TensorFlow's auto-sharding, with which a strategy of several workers would split the dataset again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options).shard(part.num_parts, part.index)


def _check_same_order(tf: Any, dataset: Any) -> None:
    for step in steps_of(dataset):
        if _is_unseeded(getattr(step, "_seed", 1), getattr(step, "_seed2", 1)) or _shuffles_inside(tf, step):
            raise ValueError(
                "A `tf.data.Dataset` must have the same order on every process, otherwise rows are lost or duplicated. "
                "Received: a dataset that shuffles without a seed. Use `.shuffle(buffer_size, seed=...)`, or call "
                "`keras.utils.set_random_seed` before you build the dataset."
            )
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                "A `tf.data.Dataset` must have the same order on every process, otherwise rows are lost or duplicated. "
                "Received: a dataset with `deterministic=False`. Leave this argument out."
            )


def steps_of(dataset: Any) -> Iterator[Any]:
    """Yields the last dataset of a `tf.data` pipeline, then all datasets before it."""
    yield dataset
    for before in dataset._inputs():
        yield from steps_of(before)


def _shuffles_inside(tf: Any, step: Any) -> bool:
    """Whether the function of an `interleave` or `flat_map` builds datasets that shuffle without a seed."""
    function: Any = getattr(getattr(step, "_map_func", None), "function", None)
    operations = [] if function is None else function.graph.get_operations()
    shuffles = [op for op in operations if "ShuffleDataset" in op.type]
    return any(_is_unseeded(*[tf.get_static_value(seed) for seed in op.inputs[2:4]]) for op in shuffles)


def _is_unseeded(seed: Any, seed2: Any) -> bool:
    return seed is not None and seed2 is not None and int(seed) == 0 and int(seed2) == 0
