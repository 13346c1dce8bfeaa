"""How processes share the data of `fit`: the settings, and checks that all processes agree."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.data.split_data import is_split


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Settings for the data of `fit`, `evaluate` and `predict` on several processes."""

    auto_shard: bool = True
    """Whether all processes receive the same data, and each uses its part of every batch."""

    gather: bool = True
    """Whether `predict` returns the rows of all processes on each process."""


_SHARING = "_keras_shardopt_sharing"


def sharing_of(model: Any) -> Sharing:
    """Return the model's settings for the data of several processes, or the default settings."""
    sharing: Sharing = vars(model).get(_SHARING, Sharing())
    return sharing


def set_sharing(model: Any, auto_shard: bool | None, gather: bool | None) -> None:
    """Change the model's settings for the data of several processes. None keeps the present value."""
    given = {"auto_shard": auto_shard, "gather": gather}
    changed = {name: value for name, value in given.items() if value is not None}
    object.__setattr__(model, _SHARING, dataclasses.replace(sharing_of(model), **changed))


def splits_separate_part(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `fit` with these arguments splits off validation data from data already divided among processes."""
    names = list(inspect.signature(keras.Model.fit).parameters)[1:]
    given = {**dict(zip(names, args)), **kwargs}
    if not given.get("validation_split") or given.get("validation_data") is not None:
        return False
    return is_split(*[given.get(name) for name in ("x", "y", "sample_weight")])


def takes_whole(model: Any, data: Sequence[Any], splits_separate_part: bool) -> bool:
    """Whether all processes pass the same `data` (`x`, `y`, ...), and each uses its rows of every batch."""
    return sharing_of(model).auto_shard and not splits_separate_part and not is_split(*data)


def gathers_rows(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `predict` of this model, with these arguments, returns the rows of all processes."""
    sharing = sharing_of(model)
    return sharing.gather and sharing.auto_shard and not is_split(kwargs.get("x", args[0] if args else None))


def check_kinds(are_whole: Sequence[bool]) -> None:
    """Raise ValueError if only some processes have the whole data. `are_whole` has one entry per process."""
    if len(set(are_whole)) > 1:
        kinds = {True: "the whole data", False: "a separate part"}
        given = ", ".join(f"process {i}: {kinds[is_whole]}" for i, is_whole in enumerate(are_whole))
        raise ValueError(
            "Either all processes must pass the whole data, or each process must pass a separate part. Received: "
            f"{given}. Use `keras_shardopt.shard_data` on all processes, or on none."
        )


def check_alike(lengths: Sequence[int], first_batches: Sequence[int]) -> None:
    """Raise ValueError if processes have different numbers of batches, or first batches with different checksums."""
    facts = list(zip(lengths, first_batches))
    others = [i for i, fact in enumerate(facts) if fact != facts[0]]
    if others:
        what = "numbers of batches" if any(lengths[i] != lengths[0] for i in others) else "first batches"
        raise ValueError(
            f"All processes must pass the same data, because each process uses a part of every batch. Received: {what} "
            f"that differ from those of process 0 on {check.listed([f'process {i}' for i in others], ', ')}. Load the "
            "same data on every process, and seed all shuffling and augmentation. To load separate rows on each "
            "process, use `keras_shardopt.shard_data(...)`, or `keras_shardopt.data_parallel(auto_shard=False)`."
        )


def check_batches(batches: Sequence[tuple[int, int]], step: int, first: int | None = None) -> None:
    """Raise ValueError if processes have different data in one of the batches `first` to `step`.

    `batches` has, for each process, the row count of batch `step` (0: no batch left) and one checksum of all these
    batches. `first=None` means that the checksum covers batch `step` only.
    """
    if len(set(batches)) > 1:
        rows = [num_rows for num_rows, _ in batches]
        others = [f"process {i}" for i, batch in enumerate(batches) if batch != batches[0]]
        what = f"batches of {rows} rows, by process" if len(set(rows)) > 1 else ""
        what = what or f"values that differ from those of process 0 on {check.listed(others, ', ')}"
        where = f"batch {step}" if first is None or first >= step else f"one of the batches {first} to {step}"
        raise ValueError(
            "All processes must pass the same batches, because each process uses a part of every batch. Received: "
            f"{what}, in {where} (the first is 0). Load the same data on every process, and seed all shuffling and "
            "augmentation; or use `keras_shardopt.shard_data(...)`, or `data_parallel(auto_shard=False)`."
        )


def warn_of_same_parts() -> None:
    """Warn that all processes train on the same rows, although each should have its own."""
    warn(
        "Each process must pass different rows with `auto_shard=False` or a `DistributedSampler`. Received: the same "
        "first batch on all processes, so they repeat the same work. Leave out `auto_shard=False`, pass this process's "
        "rank to the sampler, or use `keras_shardopt.shard_data`.",
    )
