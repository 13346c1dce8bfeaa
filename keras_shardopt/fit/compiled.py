"""Prepares models that are compiled in a `data_parallel()` block, and detects ranks that would train separately.

Private names of Keras touched here (a test checks that each exists):
    `models.Trainer.__init__`, `compile` - called by each constructor and each `compile` of a model, also in
        `load_model`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.models import Trainer, has_built_in_step, is_prepared, optimizers_in_step
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.fit.calls import cross_shards_in_step
from keras_shardopt.fit.prepare import prepare_for
from keras_shardopt.fit.sharing import set_sharing

# Names of bool attributes that this file sets on a model.
_WAITS = "_keras_shardopt_waits"  # whether the model was compiled before its optimizers were set
_IS_LEFT = "_keras_shardopt_left_unprepared"  # whether the model stays unprepared, as requested or after a warning
_IS_OF_BLOCK = "_keras_shardopt_of_block"  # whether the model is from a `data_parallel()` block that prepares models


class _Block:
    """A `data_parallel()` block with several replicas. Its methods run when a model is constructed or compiled."""

    def __init__(self, prepares: bool, auto_shard: bool) -> None:
        self.prepares = prepares
        self._auto_shard = auto_shard
        self.waiting: list[weakref.ref[Any]] = []
        """Compiled models whose optimizers are not set yet."""

    def constructed(self, model: Any) -> None:
        """Mark a model as constructed in this block."""
        object.__setattr__(model, _IS_OF_BLOCK, self.prepares)

    def compiled(self, model: Any) -> None:
        """Call `prepare` for a model that was compiled in this block, or warn that its optimizer is no `CrossShard`."""
        self.constructed(model)
        object.__setattr__(model, _IS_LEFT, not self.prepares)
        set_sharing(model, None if self._auto_shard else False, None)
        if not self.prepares or _prepare_if_possible(model):
            return
        if has_built_in_step(model):
            _warn_of_plain_optimizer(model)
        else:  # optimizers can be set later, as in the GAN of Keras's guide
            object.__setattr__(model, _WAITS, True)
            self.waiting.append(weakref.ref(model))


class _OneReplicaBlock:
    """A `data_parallel()` block with one replica. Calls `prepare` only if an option of the optimizer needs it."""

    waiting: Sequence[weakref.ref[Any]] = ()

    def constructed(self, model: Any) -> None:
        """Do nothing when a model is constructed, because one replica can train with any optimizer."""

    def compiled(self, model: Any) -> None:
        """Call `prepare` if an option of the optimizer needs it. Otherwise, on PyTorch, set `steps_per_execution=1`."""
        if _needs_prepared(model):
            prepare_for(model)
        elif _torch is not None and model.steps_per_execution > 1 and cross_shards_in_step(model):
            _torch.step_one_by_one(model)


# PyTorch only: finds models that ranks would train separately, and makes models run one step per execution.
_torch = for_backend({"torch": "keras_shardopt.fit.torch"})
_blocks: list[_Block | _OneReplicaBlock] = []


@contextlib.contextmanager
def preparing_compiled(wanted: bool, auto_shard: bool, are_several: bool = True) -> Iterator[None]:
    """Prepare models compiled in this block; if not `wanted`, mark them unprepared. `are_several`: several replicas."""
    if not are_several and not wanted:
        yield
        return
    block = _Block(wanted, auto_shard) if are_several else _OneReplicaBlock()
    before = Trainer.__init__, Trainer.compile

    def then(method: Callable[..., None], report: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call_and_report(model: Any, *args: Any, **kwargs: Any) -> None:
            method(model, *args, **kwargs)
            if _blocks[-1] is block:  # otherwise leave the model to an inner block
                report(model)

        return call_and_report

    Trainer.__init__, Trainer.compile = then(before[0], block.constructed), then(before[1], block.compiled)
    _blocks.append(block)
    try:
        yield
        for model in [reference() for reference in block.waiting]:
            if model is not None:
                _prepare_waiting(model)
    finally:
        _blocks.remove(block)
        Trainer.__init__, Trainer.compile = before


def _prepare_waiting(model: Any) -> bool:
    """Call `prepare` for a model that was compiled before its optimizers were set. Return whether that happened."""
    if not vars(model).pop(_WAITS, False):
        return False
    if _prepare_if_possible(model):
        return is_prepared(model)
    _warn_of_plain_optimizer(model)
    return False


def _prepare_if_possible(model: Any) -> bool:
    """Call `prepare` if an optimizer of the model is a `CrossShard`. Return whether the model has such an optimizer."""
    cross_shards = cross_shards_in_step(model)
    if any(len(cross_shard.group_assignment or ()) > 1 for cross_shard in cross_shards):
        object.__setattr__(model, _IS_LEFT, True)  # groups train separately, as requested
    elif cross_shards:
        prepare_for(model)
    return bool(cross_shards)


def _warn_of_plain_optimizer(model: Any) -> None:
    if model.optimizer is None or is_prepared(model) or not _train_separately(model):
        return  # for a prepared model, the training step itself raises an error about such an optimizer
    warn(_separate_training(model))


def _train_separately(model: Any) -> bool:
    return _torch is not None and bool(_torch.train_separately(model))


def _check_trains_together(model: Any) -> None:
    """Raise ValueError if ranks (processes) would train separate copies of a model from a `data_parallel()` block."""
    if not vars(model).get(_IS_OF_BLOCK, False) or is_prepared(model) or not optimizers_in_step(model):
        return
    if not cross_shards_in_step(model) and _train_separately(model):
        raise ValueError(_separate_training(model))


def _separate_training(model: Any) -> str:
    name = type(optimizers_in_step(model)[0]).__name__
    return (
        "A model that several processes train together needs a `CrossShard` to average gradients. Received: "
        f"`{model.name}`, compiled with {name} on {processes.process()[0]} processes: ranks would train separately. "
        f"Use `keras_shardopt.CrossShard({name}(...))`. To train separate models, use `data_parallel(prepare=False)`."
    )


def watching_fit(in_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Model.fit` that prepares models of `data_parallel()`, or raises if ranks would train separately."""

    @functools.wraps(in_keras)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _prepare_waiting(model):
            return model.fit(*args, **kwargs)
        _check_trains_together(model)
        if not is_prepared(model) and not vars(model).get(_IS_LEFT, False):
            # The model was compiled after the `data_parallel()` block that it was made in, or outside of all blocks.
            is_due = vars(model).get(_IS_OF_BLOCK, False) or (_needs_prepared(model) and processes.num_replicas() == 1)
            if is_due and _prepare_if_possible(model):
                return model.fit(*args, **kwargs)
            _warn_of_unprepared(model)
        return in_keras(model, *args, **kwargs)

    return fit


def watching_train_on_batch(in_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `Model.train_on_batch` that raises ValueError if processes would train separately."""

    @functools.wraps(in_keras)
    def train_on_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
        _check_trains_together(model)
        return in_keras(model, *args, **kwargs)

    return train_on_batch


def _needs_prepared(model: Any) -> bool:
    """Whether an option of the model's optimizer needs `prepare` even on a single replica."""
    return any(each.keeps_bits for part in cross_shards_in_step(model) for each in part.extension_stages)


def _warn_of_unprepared(model: Any) -> None:
    if processes.process()[0] == 1:
        return
    if not cross_shards_in_step(model):
        # Without a process group, `num_replicas` raises ValueError. Processes are then separate jobs, so do not warn.
        with contextlib.suppress(ValueError):
            if has_built_in_step(model) and processes.num_replicas() > 1:
                object.__setattr__(model, _IS_LEFT, True)  # warn only once per model
                _warn_of_plain_optimizer(model)
        return
    if processes.num_replicas() == 1:
        return
    object.__setattr__(model, _IS_LEFT, True)  # warn only once per model
    warn(
        "A model that several processes train together must be passed to `keras_shardopt.prepare`. Otherwise each "
        "process has its own metrics, callbacks can make different decisions, and uneven parts of a batch have equal "
        f"weight. Received: `fit` of `{model.name}` without `prepare`. Call `keras_shardopt.prepare(model)` after "
        "`compile`. To train without `prepare`, use `data_parallel(prepare=False)`.",
    )
