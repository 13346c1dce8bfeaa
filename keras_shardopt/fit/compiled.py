"""Models that are made, compiled or trained where there are several replicas: prepared, warned of, or refused.

Private names of Keras touched here (a test holds each of them):
    `models.Trainer.__init__`, `compile` - what each constructor and each `compile` of a model comes to, also those of
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
from keras_shardopt.fit.calls import reducers_in
from keras_shardopt.fit.prepare import prepare_for
from keras_shardopt.fit.sharing import set_sharing

# On a model: it is compiled, and what it trains with is not known yet; it is left as it is because somebody said so;
# it was made or compiled in a block that prepares models.
_WAITS = "_keras_shardopt_waits"
_IS_LEFT = "_keras_shardopt_left_unprepared"
_IS_OF_BLOCK = "_keras_shardopt_of_block"


class _Block:
    """A block in which models are compiled."""

    def __init__(self, prepares: bool, auto_shard: bool) -> None:
        self.prepares = prepares
        self._auto_shard = auto_shard
        self.waiting: list[weakref.ref[Any]] = []
        """The models whose optimizers are not known yet."""

    def made(self, model: Any) -> None:
        """Notes where a model was made."""
        object.__setattr__(model, _IS_OF_BLOCK, self.prepares)

    def compiled(self, model: Any) -> None:
        """Prepares a model, or warns of its optimizer."""
        self.made(model)
        object.__setattr__(model, _IS_LEFT, not self.prepares)
        set_sharing(model, None if self._auto_shard else False, None)
        if not self.prepares or _prepare_if_possible(model):
            return
        if has_built_in_step(model):
            _warn_of_plain_optimizer(model)
        else:  # it may get its optimizers later, as the GAN of Keras' guide does
            object.__setattr__(model, _WAITS, True)
            self.waiting.append(weakref.ref(model))


class _Alone:
    """A block with one replica, on which only models are prepared that have several parts of a batch."""

    waiting: Sequence[weakref.ref[Any]] = ()

    def made(self, model: Any) -> None:
        """Notes nothing: one replica trains with any optimizer."""

    def compiled(self, model: Any) -> None:
        """Lets the same program do what it does with several."""
        if _cuts_batches(model):
            prepare_for(model)
        elif _steps is not None and model.steps_per_execution > 1 and reducers_in(model):
            _steps.step_one_by_one(model)


# Where Keras makes one step at a time, and where each process trains a copy of the model.
_steps = for_backend({"torch": "keras_shardopt.fit.torch"})
_blocks: list[_Block | _Alone] = []


@contextlib.contextmanager
def preparing_compiled(wanted: bool, auto_shard: bool, are_several: bool = True) -> Iterator[None]:
    """Within it, models that are compiled are prepared if that is `wanted`; else they are left unchanged.

    Args:
        wanted: whether they are.
        auto_shard: what `prepare` is given for them, now or later.
        are_several: whether there are several replicas.
    """
    if not are_several and not wanted:
        yield
        return
    block = _Block(wanted, auto_shard) if are_several else _Alone()
    before = Trainer.__init__, Trainer.compile

    def then(method: Callable[..., None], tell: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call_and_tell(model: Any, *args: Any, **kwargs: Any) -> None:
            method(model, *args, **kwargs)
            if _blocks[-1] is block:  # or one inside it says what becomes of the model
                tell(model)

        return call_and_tell

    Trainer.__init__, Trainer.compile = then(before[0], block.made), then(before[1], block.compiled)
    _blocks.append(block)
    try:
        yield
        for model in [reference() for reference in block.waiting]:
            if model is not None:
                _settle(model)
    finally:
        _blocks.remove(block)
        Trainer.__init__, Trainer.compile = before


def _settle(model: Any) -> bool:
    """Prepares a model that has waited for its optimizers, and returns whether it has; warns where it has none."""
    if not vars(model).pop(_WAITS, False):
        return False
    if _prepare_if_possible(model):
        return is_prepared(model)
    _warn_of_plain_optimizer(model)
    return False


def _prepare_if_possible(model: Any) -> bool:
    """Prepares a model if it trains with a `CrossShard`, and returns whether it does."""
    reducers = reducers_in(model)
    if any(len(reducer.group_assignment or ()) > 1 for reducer in reducers):
        object.__setattr__(model, _IS_LEFT, True)  # groups train apart, as was asked for
    elif reducers:
        prepare_for(model)
    return bool(reducers)


def _warn_of_plain_optimizer(model: Any) -> None:
    if model.optimizer is None or is_prepared(model) or not _train_apart(model):
        return  # a prepared model refuses to train so
    warn(_apart_in_words(model))


def _train_apart(model: Any) -> bool:
    return _steps is not None and bool(_steps.train_apart(model))


def _refuse_to_train_apart(model: Any) -> None:
    """Raises ValueError if each process would train a model of a `data_parallel()` block by itself."""
    if not vars(model).get(_IS_OF_BLOCK, False) or is_prepared(model) or not optimizers_in_step(model):
        return
    if not reducers_in(model) and _train_apart(model):
        raise ValueError(_apart_in_words(model))


def _apart_in_words(model: Any) -> str:
    name = type(optimizers_in_step(model)[0]).__name__
    return (
        "A model that several processes train together needs a `CrossShard`, which averages their gradients. Received: "
        f"`{model.name}`, compiled with {name} on {processes.process()[0]} processes, whose ranks would train apart. "
        f"Use `keras_shardopt.CrossShard({name}(...))`, or `data_parallel(prepare=False)` if that is meant."
    )


def watching_fit(in_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `fit` that prepares models and warns of ranks that train apart."""

    @functools.wraps(in_keras)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _settle(model):
            return model.fit(*args, **kwargs)
        _refuse_to_train_apart(model)
        if not is_prepared(model) and not vars(model).get(_IS_LEFT, False):
            # `compile` has not prepared it, outside of a scope.
            is_due = vars(model).get(_IS_OF_BLOCK, False) or (_cuts_batches(model) and processes.num_replicas() == 1)
            if is_due and _prepare_if_possible(model):
                return model.fit(*args, **kwargs)
            _warn_of_unprepared(model)
        return in_keras(model, *args, **kwargs)

    return fit


def watching_train_on_batch(in_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `train_on_batch` that raises if ranks would train apart."""

    @functools.wraps(in_keras)
    def train_on_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_to_train_apart(model)
        return in_keras(model, *args, **kwargs)

    return train_on_batch


def _cuts_batches(model: Any) -> bool:
    """Whether an extension of its optimizer needs a prepared model on a single replica, too."""
    return any(each.keeps_bits for part in reducers_in(model) for each in part.extension_stages)


def _warn_of_unprepared(model: Any) -> None:
    if processes.process()[0] == 1:
        return
    if not reducers_in(model):
        # Without a process group, which asking for replicas is an error about, a plain model trains by itself.
        with contextlib.suppress(ValueError):
            if has_built_in_step(model) and processes.num_replicas() > 1:
                object.__setattr__(model, _IS_LEFT, True)  # once is enough
                _warn_of_plain_optimizer(model)
        return
    if processes.num_replicas() == 1:
        return
    object.__setattr__(model, _IS_LEFT, True)  # once is enough
    warn(
        "A model that several processes train together must be prepared, or each of them has metrics of its own, "
        "callbacks decide apart, and uneven parts of a batch count alike. "
        f"Received: `fit` of `{model.name}`, which is not. Compile it inside `with keras_shardopt.data_parallel():`, "
        "or call `keras_shardopt.prepare(model)` after `compile`. If it is meant: `data_parallel(prepare=False)`.",
    )
