"""Finds the optimizers of a model, and the models of a variable.

Keras has only `model.optimizer`, but a GAN can hold two optimizers as attributes. An optimizer has no reference to
the models of its variables.

Private names of Keras touched here (a test checks that each exists):
    `Layer._flatten_layers` - all layers of a model.
    `KerasSaveable._unpickle_model` - the class method that a pickle of a model names.
    `keras.src.trainers.trainer` - the module of the class that defines each model's constructor and `compile`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.trainers import trainer

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Optimizer, Variable

# Only on PyTorch do layers have state outside Keras variables: the buffers of modules.
_modules = for_backend({"torch": "keras_shardopt.backends.torch.module_buffers"})

Trainer: Any = next(kind for kind in keras.Model.__mro__ if kind.__module__ == trainer.__name__)
"""The base class of the backends' trainers in Keras: `Trainer`, and from 3.16 on `BaseTrainer`."""


def optimizers_of(model: Any) -> list[Any]:
    """Return each optimizer of the model once: `model.optimizer` first, then those in attributes.

    Searches the attributes of the model and its layers, and lists, tuples and dicts in them. Does not search inside an
    optimizer, so inner optimizers are left out.
    """
    found: dict[int, Any] = {}
    first = getattr(model, "optimizer", None)
    if first is not None:
        found[id(first)] = first
    seen: set[int] = set()
    for layer in layers_of(model):
        for value in vars(layer).values():
            for optimizer in _optimizers_in(value, seen):
                found.setdefault(id(optimizer), optimizer)
    return list(found.values())


def has_built_in_step(model: Any) -> bool:
    """Return whether the model uses Keras' built-in `train_step`."""
    return model.__class__.train_step is keras.Model.train_step


def optimizers_in_step(model: Any) -> list[Any]:
    """Return the optimizers that `train_step` can use: all if the model overrides it, else only `model.optimizer`."""
    if not has_built_in_step(model):
        return optimizers_of(model)
    first = getattr(model, "optimizer", None)
    return [] if first is None else [first]


def models_with(variables: Sequence[Variable]) -> list[Any]:
    """Return the live models that hold any of these variables, largest first."""
    wanted = {id(variable) for variable in variables}
    models = [
        model
        for model in living_models
        if getattr(model, "built", False) and any(id(v) in wanted for v in model.variables)
    ]
    return sorted(models, key=lambda model: -len(model.variables))


def model_compiled_with(optimizer: Optimizer) -> Any:
    """Return the live model compiled with this optimizer object, or None unless exactly one exists."""
    found = [model for model in living_models if getattr(model, "optimizer", None) is optimizer]
    return found[0] if len(found) == 1 else None


def layers_of(model: Any) -> list[Any]:
    """Return the model and all layers nested inside it."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model] if flatten is None else list(flatten())


def buffers_of(model: Any) -> list[Variable]:
    """Return the buffers of PyTorch modules inside a model as non-trainable variables."""
    if _modules is None:
        return []
    return list({id(buffer): buffer for layer in layers_of(model) for buffer in _modules.buffers_of(layer)}.values())


def equal_buffers(model: Any) -> list[Variable]:
    """Return the PyTorch buffers that must be equal on all ranks: those of a prepared model, except during an epoch."""
    return buffers_of(model) if is_prepared(model) and not has_own_statistics(model) else []


def states_of(layer: Any) -> list[Variable]:
    """Return the recurrent states of a layer: the non-trainable variables in `layer.states`."""
    states = keras.tree.flatten(getattr(layer, "states", None))
    return [state for state in states if isinstance(state, keras.Variable) and not state.trainable]


def ids_of_states(model: Any) -> set[int]:
    """Return the `id` of each variable with a recurrent state in the model's layers."""
    return {id(state) for layer in layers_of(model) for state in states_of(layer)}


def _optimizers_in(value: Any, seen: set[int]) -> Iterator[Any]:
    if issubclass(type(value), keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(item, seen)


class Living:
    """The live instances of a class: those that exist when `scan` is called, and those created later."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[Any]:
        living = (reference() for reference in self._known.valuerefs())
        return iter([thing for thing in living if thing is not None])

    def noting(self, method: Callable[..., None]) -> Callable[..., None]:
        """Wrap a method of the class, so each call records its instance."""

        @functools.wraps(method)
        def noting(thing: Any, *args: Any, **kwargs: Any) -> None:
            self._known[id(thing)] = thing
            method(thing, *args, **kwargs)

        vars(noting)["scan"] = self.scan
        return noting

    def scan(self) -> None:
        kinds = [self._kind]
        for kind in kinds:
            kinds += type.__subclasses__(kind)
        # Do not use `gc.get_objects()`: its list would also refer to tuples that other threads are still building, and
        # CPython would raise SystemError in those threads.
        found = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
        # Sort, because all processes must list the instances in the same order.
        found.sort(key=lambda thing: (str(vars(thing).get("name", "")), type(thing).__name__))
        self._known.update((id(thing), thing) for thing in found)


living_models = Living(Trainer)
noting_models = noting_compiled = living_models.noting


class Prepared:
    """The base class of models passed to `prepare`. Their `fit` trains on all replicas together."""


def is_prepared(model: Any) -> bool:
    """Return whether the model was passed to `prepare`."""
    return isinstance(model, Prepared)


_made: weakref.WeakValueDictionary[tuple[type, ...], type] = weakref.WeakValueDictionary()
_set_class: Callable[[Any, type], None] = vars(object)["__class__"].__set__
_MIXINS = "_keras_shardopt_mixins"
_OWN = "_keras_shardopt_own"


class _Quiet:
    """Overrides a user's `__init_subclass__`, which must not run for the subclasses that `mix_in` creates."""

    def __init_subclass__(cls) -> None:
        pass


def mix_in(model: Any, mixin: type) -> None:
    """Make the methods of the class `mixin` override those of one model. Idempotent.

    `type(model)` becomes a subclass of `mixin` and the user's class. `model.__class__` remains the user's class, which
    Keras needs to save, clone or pickle a model.
    """
    kind = type(model)
    if issubclass(kind, mixin):
        return
    mixins = vars(kind).get(_MIXINS, ())
    cls = kind.__bases__[-1] if mixins else kind
    names = {name for base in mixin.__mro__ if base not in kind.__mro__ for name in vars(base)}
    own = {name: vars(model).pop(name) for name in names & vars(model).keys()}
    methods = {name: staticmethod(method) for name, method in own.items()}
    added = [mixin, type("OfThisModel", (), {**methods, _OWN: own})] if own else [mixin]
    place = sum(hasattr(each, "is_outermost") for each in mixins)
    _set_class(model, _mixed(cls, (*mixins[:place], *added, *mixins[place:])))


def take_out(thing: Any) -> None:
    """Undo every `mix_in` of a model."""
    mixins = getattr(type(thing), _MIXINS, ())
    if mixins:
        _set_class(thing, thing.__class__)
    for mixin in mixins:
        vars(thing).update(getattr(mixin, _OWN, {}))


def _mixed(cls: Any, mixins: tuple[type, ...]) -> type:
    """Return a class that inherits from the mixins and from `cls`, the user's class.

    A call of the new class, and a copy or pickle of its instance, give an instance of `cls`.
    """
    made: Any = _made.get((cls, *mixins))
    if made is not None:
        return made

    def reduced(model: Any, protocol: Any) -> Any:
        found = cls.__reduce_ex__(model, protocol)
        if isinstance(found, str):
            return found
        plain = [cls if part is made else part for part in (found[0], *found[1])]
        return (plain[0], tuple(plain[1:]), *found[2:])

    seen = property(lambda model: cls, lambda model, other: _set_class(model, _mixed(other, mixins)))
    same = ("__module__", "__qualname__", "__doc__", "_unpickle_model")
    content = {name: getattr(cls, name) for name in same if hasattr(cls, name)}
    content |= {"__class__": seen, _MIXINS: mixins, "__reduce_ex__": reduced}
    content["__new__"] = lambda kind, *args, **kwargs: cls(*args, **kwargs)
    made = type.__new__(type(cls), cls.__name__, (_Quiet, *mixins, cls), content)
    if not any(hasattr(mixin, _OWN) for mixin in mixins):  # `_OWN` marks one model's methods: do not reuse them
        _made[(cls, *mixins)] = made
    return made


def methods_inside(context: Callable[[Any], contextlib.AbstractContextManager[None]], names: Sequence[str]) -> Any:
    """Return a mixin with methods of these names that call `super()` inside `context(model)`."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with context(self):
                return getattr(super(mixin, self), name)(*args, **kwargs)

        return call

    mixin = type(context.__name__, (keras.Model,), {name: method(name) for name in names})
    return mixin


_HAS_OWN_STATISTICS = "_keras_shardopt_has_own_statistics"


def set_replica_statistics(model: Any, has_own: bool) -> None:
    """Record whether this replica's moving statistics can differ from those of other replicas."""
    object.__setattr__(model, _HAS_OWN_STATISTICS, has_own)


def has_own_statistics(model: Any) -> bool:
    """Return whether this replica's moving statistics can differ from those of other replicas."""
    return bool(vars(model).get(_HAS_OWN_STATISTICS))
