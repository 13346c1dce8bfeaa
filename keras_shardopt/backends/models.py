"""Which optimizers a model holds, and which models hold a variable.

Keras knows `model.optimizer` only. The models of its GAN guide hold two optimizers as attributes, and an optimizer that
updates variables does not know whose they are.

Private names of Keras touched here (a test holds each of them):
    `Layer._flatten_layers` - all layers of a model.
    `keras.src.trainers.trainer` - the module of the class whose constructor and `compile` each model runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.trainers import trainer

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Variable

# Backends with state of layers that is in no variable.
_modules = for_backend({"torch": "keras_shardopt.backends.torch.module_buffers"})

Trainer: Any = next(kind for kind in keras.Model.__mro__ if kind.__module__ == trainer.__name__)
"""Keras' trainer below that of the backend: `Trainer`, and from 3.16 on `BaseTrainer`."""


def optimizers_of(model: Any) -> list[Any]:
    """Every optimizer that the model holds: `model.optimizer` first, then those in attributes, each once.

    Attributes of the model and of the layers inside it are searched, lists, tuples and dicts in them as well. What is
    inside an optimizer is not listed.
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
    """Whether the model trains with Keras' own `train_step`."""
    return type(model).train_step is keras.Model.train_step


def optimizers_in_step(model: Any) -> list[Any]:
    """The optimizers that its `train_step` may use: `model.optimizer` only, where that is Keras' own."""
    if not has_built_in_step(model):
        return optimizers_of(model)
    first = getattr(model, "optimizer", None)
    return [] if first is None else [first]


def models_with(variables: Sequence[Variable]) -> list[Any]:
    """The living models that hold one of these variables, those with most variables first.

    A model made before this package was imported is found once it is compiled.
    """
    wanted = {id(variable) for variable in variables}
    models = [
        model
        for model in living_models
        if getattr(model, "built", False) and any(id(v) in wanted for v in model.variables)
    ]
    return sorted(models, key=lambda model: -len(model.variables))


def model_compiled_with(optimizer: Any) -> Any:
    """The living model that is compiled with this very optimizer; None where there is none, or several are."""
    found = [model for model in living_models if getattr(model, "optimizer", None) is optimizer]
    return found[0] if len(found) == 1 else None


def layers_of(model: Any) -> list[Any]:
    """The model itself and every layer inside it, at any depth."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model] if flatten is None else list(flatten())


def buffers_of(model: Any) -> list[Variable]:
    """The buffers of PyTorch modules inside a model, as variables that are not trained. Other backends have none."""
    if _modules is None:
        return []
    return list({id(buffer): buffer for layer in layers_of(model) for buffer in _modules.buffers_of(layer)}.values())


def equal_buffers(model: Any) -> list[Variable]:
    """Those that must be equal on all replicas now: within an epoch of a prepared model each rank has its own."""
    return buffers_of(model) if is_prepared(model) and not has_own_statistics(model) else []


def states_of(layer: Any) -> list[Variable]:
    """The variables in `layer.states`, with a state for each row of a batch. Keras tracks those of its RNNs nowhere."""
    states = keras.tree.flatten(getattr(layer, "states", None))
    return [state for state in states if isinstance(state, keras.Variable) and not state.trainable]


def ids_of_states(model: Any) -> set[int]:
    """The `id` of each variable that a layer of the model carries from batch to batch for each row."""
    return {id(state) for layer in layers_of(model) for state in states_of(layer)}


def _optimizers_in(value: Any, seen: set[int]) -> Iterator[Any]:
    if issubclass(type(value), keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(item, seen)


class Living:
    """The living instances of a class, noted when one of these methods of theirs is called.

    The garbage collector could list them without that. But while Python holds such a list, a tuple that another thread
    is filling fails there: "SystemError: bad argument to internal function", in the middle of somebody's data loader.
    """

    def __init__(self, kind: type, *methods: str) -> None:
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        for name in methods:
            setattr(kind, name, self._noting(getattr(kind, name)))

    def __iter__(self) -> Iterator[Any]:
        living = (reference() for reference in self._known.valuerefs())
        return iter([thing for thing in living if thing is not None])

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(thing: Any, *args: Any, **kwargs: Any) -> Any:
            self._known[id(thing)] = thing
            return method(thing, *args, **kwargs)

        return noting


living_models = Living(Trainer, "__init__", "compile")
_OUTERMOST = "_keras_shardopt_outermost"


def override_method(model: Any, name: str, function: Callable[..., Any], outermost: bool = False) -> None:
    """Lets `model.name(...)` call `function(model, real, ...)`, where `real` is the method that it replaces.

    Doing it twice changes nothing. One that is `outermost` stays around those that come later.
    """
    real = getattr(model, name)
    around = []  # the functions that stand around the method, the outermost first
    while isinstance(real, functools.partial) and len(real.args) == 2 and real.args[0] is model:
        around.append(real.func)
        real = real.args[1]
    if function not in around:
        place = sum(1 for other in around if hasattr(other, _OUTERMOST)) if not outermost else 0
        around.insert(place, function)
        if outermost:
            vars(function)[_OUTERMOST] = True
        for other in reversed(around):
            real = functools.partial(other, model, real)
        # Past Keras' attribute tracking, and torch's.
        object.__setattr__(model, name, real)


_IS_PREPARED = "_keras_shardopt_prepared"


def note_prepared(model: Any) -> None:
    """Notes that `fit` of this model is that of all replicas together."""
    object.__setattr__(model, _IS_PREPARED, True)


_HAS_OWN_STATISTICS = "_keras_shardopt_has_own_statistics"


def note_own_statistics(model: Any, has_own: bool) -> None:
    """Notes whether the moving statistics of this replica are its own, of a model with a copy on each."""
    object.__setattr__(model, _HAS_OWN_STATISTICS, has_own)


def has_own_statistics(model: Any) -> bool:
    """Whether they are."""
    return bool(vars(model).get(_HAS_OWN_STATISTICS))


def is_prepared(model: Any) -> bool:
    """Whether it is."""
    return _IS_PREPARED in vars(model)
