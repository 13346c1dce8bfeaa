"""How several processes share the data of a prepared model: what is set for it, and what they compare."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.data.own_parts import is_own_part


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How several processes share what `fit`, `evaluate` and `predict` of a prepared model are given."""

    auto_shard: bool = True
    """Whether all are given the same data, of which each works on a part of every batch."""

    gather: bool = True
    """Whether `predict` returns the rows of all processes on each of them."""


_SHARING = "_keras_shardopt_sharing"


def sharing_of(model: Any) -> Sharing:
    """What is set for a model."""
    sharing: Sharing = vars(model).get(_SHARING, Sharing())
    return sharing


def set_sharing(model: Any, auto_shard: bool | None, gather: bool | None) -> None:
    """Sets it; None leaves what is set."""
    given = {"auto_shard": auto_shard, "gather": gather}
    changed = {name: value for name, value in given.items() if value is not None}
    object.__setattr__(model, _SHARING, dataclasses.replace(sharing_of(model), **changed))


def splits_own_part(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `fit` splits validation data off what is this process's own part, by its arguments."""
    names = list(inspect.signature(keras.Model.fit).parameters)[1:]
    given = {**dict(zip(names, args)), **kwargs}
    if not given.get("validation_split") or given.get("validation_data") is not None:
        return False
    return is_own_part(*[given.get(name) for name in ("x", "y", "sample_weight")])


def check_kinds(are_whole: Sequence[bool]) -> None:
    """Raises ValueError if some processes have the whole data and others a part of it."""
    if len(set(are_whole)) > 1:
        kinds = {True: "the whole data", False: "a part of its own"}
        given = ", ".join(f"process {i}: {kinds[is_whole]}" for i, is_whole in enumerate(are_whole))
        raise ValueError(
            "All processes must be given the whole data, or all a part of it. "
            f"Received: {given}. Use `keras_shardopt.shard_data` on all of them, or on none."
        )


def check_alike(lengths: Sequence[int], first_batches: Sequence[int]) -> None:
    """Raises ValueError if processes differ in numbers of batches, or in the checksums of their first ones."""
    facts = list(zip(lengths, first_batches))
    others = [i for i, fact in enumerate(facts) if fact != facts[0]]
    if others:
        what = "numbers of batches" if any(lengths[i] != lengths[0] for i in others) else "first batches"
        raise ValueError(
            "All processes must be given the same data, of which each takes its part of every batch. Received: other "
            f"{what} than process 0 on {check.listed([f'process {i}' for i in others], ', ')}. Load the same data on "
            "every process, and seed what shuffles or changes it. If each process is to load its own rows: "
            "`keras_shardopt.shard_data(...)`, or `keras_shardopt.data_parallel(auto_shard=False)`."
        )


def check_batches(batches: Sequence[tuple[int, int]], step: int, first: int | None = None) -> None:
    """Raises ValueError if processes differ in what they have in a batch, or in several.

    Args:
        batches: of each process, how many rows it has in the last one (0: no batch left), and a checksum of all.
        step: which batch is the last.
        first: which is the first; None if it is the same.
    """
    if len(set(batches)) > 1:
        rows = [num_rows for num_rows, _ in batches]
        others = [f"process {i}" for i, batch in enumerate(batches) if batch != batches[0]]
        what = f"batches of {rows} rows, by process" if len(set(rows)) > 1 else ""
        what = what or f"other values than process 0 on {check.listed(others, ', ')}"
        where = f"batch {step}" if first is None or first >= step else f"one of the batches {first} to {step}"
        raise ValueError(
            "All processes must be given the same batches, of which each takes its part. "
            f"Received: {what}, in {where} (the first is 0). Load the same data on every process, and seed what "
            "shuffles or changes it; or use `keras_shardopt.shard_data(...)`, or `data_parallel(auto_shard=False)`."
        )


def warn_of_same_parts() -> None:
    """Says that processes train on the same rows."""
    warn(
        "Each process must be given its own rows with `auto_shard=False` or a `DistributedSampler`. Received: the same "
        "first batch on all of them, which then repeat each other's work. Leave out `auto_shard=False`, give the "
        "sampler this process's rank, or use `keras_shardopt.shard_data`.",
    )
