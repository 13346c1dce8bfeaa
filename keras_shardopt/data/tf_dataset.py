"""This process's part of a `tf.data.Dataset`.

Private names of TensorFlow touched here (test_data.py holds them):
    `Dataset._inputs`, `_seed`, `_seed2`, `_deterministic`, `_map_func` - how a `tf.data` pipeline orders its elements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from keras_shardopt.data.part import Part


def part_of_tf_dataset(dataset: Any, shuffle: bool, seed: int, part: Part) -> Any:
    """Every `num_parts`-th batch, all processes going through all of them."""
    del seed
    if shuffle:
        raise ValueError(
            "`shuffle` is not for a `tf.data.Dataset`. Received: shuffle=True. "
            "Use `dataset.shuffle(buffer_size, seed=...)`, before it is batched, with the same seed on every process."
        )
    tf = sys.modules["tensorflow"]
    _check_order_is_the_same_everywhere(tf, dataset)
    cardinality = int(dataset.cardinality())
    if cardinality >= 0:
        part.check_enough(cardinality, "elements")
    options = tf.data.Options()
    options.deterministic = True
    # Or a strategy of several workers would split it once more.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options).shard(part.num_parts, part.index)


def _check_order_is_the_same_everywhere(tf: Any, dataset: Any) -> None:
    for step in steps_of(dataset):
        if _is_unseeded(getattr(step, "_seed", 1), getattr(step, "_seed2", 1)) or _shuffles_inside(tf, step):
            raise ValueError(
                "A `tf.data.Dataset` must give its elements in the same order on every process, or rows are lost and "
                "others used twice. Received: one that shuffles without a seed. Use `.shuffle(buffer_size, seed=...)`, "
                "or `keras.utils.set_random_seed` before it is made."
            )
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                "A `tf.data.Dataset` must give its elements in the same order on every process, or rows are lost and "
                "others used twice. Received: one with `deterministic=False`. Leave that out."
            )


def steps_of(dataset: Any) -> Iterator[Any]:
    """A `tf.data` pipeline's dataset, and those that it is made of."""
    yield dataset
    for before in dataset._inputs():
        yield from steps_of(before)


def _shuffles_inside(tf: Any, step: Any) -> bool:
    """Whether the function of an `interleave` or `flat_map` makes datasets that shuffle without a seed."""
    function: Any = getattr(getattr(step, "_map_func", None), "function", None)
    operations = [] if function is None else function.graph.get_operations()
    shuffles = [op for op in operations if "ShuffleDataset" in op.type]
    return any(_is_unseeded(*[tf.get_static_value(seed) for seed in op.inputs[2:4]]) for op in shuffles)


def _is_unseeded(seed: Any, seed2: Any) -> bool:
    return seed is not None and seed2 is not None and int(seed) == 0 and int(seed2) == 0
