"""The type of a `CrossShard`, for the modules below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_shardopt.backends.gradient_scope import GradientScope
from keras_shardopt.numerics import Optimizer, Variable


class ReducingOptimizer(Optimizer, Protocol):
    """A `CrossShard`: the members that its stages, shards and checks use."""

    axis_name: str
    shard_state: bool
    loss_scale: Any
    inner: Any
    accumulation: Any
    extension_stages: Sequence[Any]
    peers: Any
    pipeline: Any
    state_finder: Any
    scope_inside: GradientScope
    _options: Any
    _inside: list[Any]
    _rollback: Any
    _shards: Any
    _skips_inside: bool
    _lays_out_state: bool
    _shared_variables: list[Variable]
    _check_shards: Callable[..., None]
    _position: Callable[[Variable], int]
    _written: Callable[[], list[Variable]]
