"""The optimizers inside an optimizer."""

from __future__ import annotations

from typing import Any, Literal

import keras

from keras_shardopt.arguments import with_article
from keras_shardopt.numerics import Optimizer, Variable


class Wrapping:
    """An optimizer of this package around another; `OptimizerWrapper` is the only one."""

    built: bool
    inner: Any
    _variables_inside: Any
    _rollback: Any

    _needs_global_gradients: bool = False
    """Whether it looks at gradients, so that what makes them global belongs around it and not inside it."""

    _makes_gradients_global: bool = False
    """Whether the gradients inside it are those of all replicas, or all towers, together."""

    _keeps_state: bool = False
    """Whether it has variables of its own, besides those of the inner optimizer."""

    _skips_overflows: bool = False
    """Whether it leaves out updates with gradients that are not finite."""

    _shard_unit: Literal["element", "variable"] | None = None
    """What of the gradients it must see to be right: all of some elements, or of some variables; None: all of all."""

    _adds_up_slices: bool = False
    """Whether it adds up something of all elements: where state is divided into slices, one slice after another."""

    _takes_penalties: bool = False
    """Whether it adds the gradients of regularizers itself."""

    _scales_loss: bool = False
    """Whether it scales the loss and unscales the gradients itself."""

    _leaves_out_updates: bool = False
    """Whether it itself leaves out updates with gradients that are not finite, for whatever reason."""


def innermost(optimizer: object) -> Any:
    """The optimizer inside all wrappers: the one with the update rule, or the `MultiOptimizer` that has several."""
    while (inner := _inner_of(optimizer)) is not None:
        optimizer = inner
    return optimizer


def base_optimizers(optimizer: object) -> list[Any]:
    """Every optimizer with an update rule inside `optimizer`."""
    root = innermost(optimizer)
    return [
        leaf
        for part in getattr(root, "optimizers", [root])
        for leaf in ([part] if part is root else base_optimizers(part))
    ]


def descendants(optimizer: object) -> list[Any]:
    """Every optimizer inside `optimizer`, wrappers and leaves."""
    found: list[Any] = []
    while (inner := _inner_of(optimizer)) is not None:
        found.append(inner)
        optimizer = inner
    return found + [leaf for leaf in base_optimizers(optimizer) if leaf is not optimizer]


def leaf_of(optimizer: Optimizer, variable: Variable) -> Any:
    """The optimizer inside `optimizer` whose update rule `variable` follows."""
    found = base_optimizers(optimizer)
    if len(found) == 1:
        return found[0]
    keys = keys_on_the_way_in(optimizer, variable)
    return next(leaf for leaf in found if any(key in leaf._trainable_variables_indices for key in keys))


def kind_of(optimizer: Optimizer) -> str:
    """The class of the innermost optimizer, or the classes of several, which decides what the arrays of state mean.

    The class's own name only: on PyTorch Keras has classes of the same name in other modules.
    """
    found = base_optimizers(optimizer)
    names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in found))
    return names if len(found) == 1 else f"{type(innermost(optimizer)).__name__}({names})"


def keys_on_the_way_in(optimizer: Optimizer, variable: Variable) -> list[Any]:
    """The keys of the variable, and of what stands for it further inside."""
    keys = [optimizer._var_key(variable)]
    for wrapper in [optimizer, *descendants(optimizer)]:
        if isinstance(wrapper, Wrapping) and wrapper.built:
            (variable,) = wrapper._variables_inside([variable])
            keys.append(optimizer._var_key(variable))
    return keys


def children(optimizer: Optimizer) -> list[Any]:
    """The optimizer right inside `optimizer`: several in a `MultiOptimizer`, none in one with an update rule."""
    inner = _inner_of(optimizer)
    return list(getattr(optimizer, "optimizers", [])) if inner is None else [inner]


def _inner_of(optimizer: object) -> Any:
    if isinstance(optimizer, Wrapping):
        return optimizer.inner
    return getattr(optimizer, "inner_optimizer", None)


def get_optimizer(identifier: Any, caller: str, argument: str = "inner_optimizer") -> Any:
    """The optimizer itself, or the one of that name or config; errors name the `argument` of `caller`."""
    if isinstance(identifier, keras.optimizers.Optimizer):
        return identifier
    if not isinstance(identifier, (str, dict)):
        is_class = isinstance(identifier, type) and issubclass(identifier, keras.optimizers.Optimizer)
        raise TypeError(
            f"`{argument}` must be a `keras.optimizers.Optimizer`, or the name or config of one. "
            f"Received: {argument}={identifier!r} "
            + (
                f"(the class itself). Use `{caller}({identifier.__name__}(...))`."
                if is_class
                else f"(of type {type(identifier).__name__}). Use for example `{caller}(keras.optimizers.Adam(1e-3))`."
            )
        )
    try:
        found = keras.optimizers.get(identifier)
        if not isinstance(found, keras.optimizers.Optimizer):
            raise ValueError(f"a config of {with_article(found)}")
        return found
    except Exception as error:  # a config that is none fails in many ways
        raise ValueError(
            f"`{argument}` must be the name or config of an optimizer that Keras knows. "
            f"Received: {argument}={identifier!r}. "
            f"Use for example `{caller}('adam')`, or pass the optimizer itself."
        ) from error


def refuse_local_gradients(outer: Wrapping, inner: Any) -> None:
    """Raises ValueError if something inside makes gradients global, which `outer` needs to be so already."""
    if isinstance(inner, Wrapping) and inner._makes_gradients_global:
        name, other = type(outer).__name__, type(inner).__name__
        raise ValueError(
            f"`{name}` must be inside `{other}`, not around it: outside it sees the gradients of one part of the batch "
            f"only. Received: inner_optimizer={shown(inner)}. Use `{other}({name}(inner_optimizer, ...))`."
        )
    for optimizer in children(inner):
        refuse_local_gradients(outer, optimizer)


def shared_variables(optimizer: Optimizer) -> list[Variable]:
    """The variables of an optimizer that are equal on all replicas."""
    return list(getattr(optimizer, "_shared_variables", optimizer.variables))


def scales_loss(optimizer: Optimizer) -> bool:
    """Whether it itself scales the loss and unscales the gradients."""
    return getattr(optimizer, "_scales_loss", isinstance(optimizer, keras.optimizers.LossScaleOptimizer))


def shown(optimizer: object) -> str:
    """What stands for an optimizer in the `repr` of one that wraps it."""
    if isinstance(optimizer, Wrapping):
        return repr(optimizer)
    inner = _inner_of(optimizer)
    return type(optimizer).__name__ + ("" if inner is None else f"({shown(inner)})")
