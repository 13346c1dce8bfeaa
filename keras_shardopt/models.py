"""Which optimizers a model holds, and which models hold a variable.

Keras knows `model.optimizer` only. The models of its GAN guide hold two optimizers as attributes, and an optimizer that
updates variables does not know whose they are.

Private name of Keras touched here (a test holds it):
    `Layer._flatten_layers` - all layers of a model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_shardopt._typing import Variable


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


def models_with(variables: Sequence[Variable]) -> list[Any]:
    """The living models that hold one of these variables, those with most variables first.

    It looks at every object that Python's garbage collector knows, which takes some 0.1 s: once per run, not per step.
    """
    wanted = {id(variable) for variable in variables}
    # By type, not `isinstance`: that would run `__class__` of proxies and of other people's lazy objects.
    kinds = [keras.Model]
    for kind in kinds:
        kinds.extend(type.__subclasses__(kind))
    wanted_types = frozenset(kinds)
    living = [thing for thing in gc.get_objects() if type(thing) in wanted_types]
    models = [
        model for model in living if getattr(model, "built", False) and any(id(v) in wanted for v in model.variables)
    ]
    return sorted(models, key=lambda model: -len(model.variables))


def layers_of(model: Any) -> list[Any]:
    """The model itself and every layer inside it, at any depth."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model] if flatten is None else list(flatten())


def _optimizers_in(value: Any, seen: set[int]) -> Iterator[Any]:
    if issubclass(type(value), keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(item, seen)
