"""Functions that find the optimizers inside an optimizer."""

from __future__ import annotations

from typing import Any, Literal

import keras

from keras_shardopt.arguments import with_article
from keras_shardopt.numerics import Optimizer, Variable


class Wrapping:
    """Base class of optimizers that wrap another one. `OptimizerWrapper` is the only direct subclass."""

    built: bool
    inner: Any
    _variables_inside: Any
    _rollback: Any

    _needs_global_gradients: bool = False
    """Whether this optimizer needs the gradients of all replicas, so `CrossShard` must be around this optimizer."""

    _makes_gradients_global: bool = False
    """Whether the wrapped optimizers receive global gradients, combined over all replicas or towers."""

    _keeps_state: bool = False
    """Whether this wrapper has its own variables, in addition to those of the inner optimizer."""

    _skips_overflows: bool = False
    """Whether this optimizer skips updates if gradients overflow (loss scaling)."""

    _shard_unit: Literal["element", "variable"] | None = None
    """The smallest part of the gradients that this wrapper can process alone; None if the wrapper needs whole
    gradients."""

    _sums_over_slices: bool = False
    """Whether this wrapper sums over all gradients (for a norm), slice by slice if the state is divided."""

    _takes_penalties: bool = False
    """Whether this wrapper adds the gradients of regularizers itself."""

    _scales_loss: bool = False
    """Whether this wrapper scales the loss and unscales the gradients itself."""

    _may_skip_updates: bool = False
    """Whether this optimizer can skip updates with nonfinite gradients."""


def innermost(optimizer: object) -> Any:
    """Return the optimizer inside all wrappers, such as an `Adam`, or a `MultiOptimizer` of several optimizers."""
    while (inner := _inner_of(optimizer)) is not None:
        optimizer = inner
    return optimizer


def base_optimizers(optimizer: object) -> list[Any]:
    """Return the optimizers with an update rule (such as `Adam`) in `optimizer`, which may be one itself."""
    root = innermost(optimizer)
    return [
        leaf
        for part in getattr(root, "optimizers", [root])
        for leaf in ([part] if part is root else base_optimizers(part))
    ]


def descendants(optimizer: object) -> list[Any]:
    """Return every optimizer inside `optimizer`: wrappers, then optimizers with an update rule, such as `Adam`."""
    found: list[Any] = []
    while (inner := _inner_of(optimizer)) is not None:
        found.append(inner)
        optimizer = inner
    return found + [leaf for leaf in base_optimizers(optimizer) if leaf is not optimizer]


def chain_of(optimizer: object) -> list[Any]:
    """Return `optimizer`, then every optimizer inside it in the order of `descendants`."""
    return [optimizer, *descendants(optimizer)]


def leaf_of(optimizer: Optimizer, variable: Variable) -> Any:
    """Return the optimizer inside `optimizer` that updates `variable`."""
    found = base_optimizers(optimizer)
    if len(found) == 1:
        return found[0]
    keys = keys_of(optimizer, variable)
    return next(leaf for leaf in found if any(key in leaf._trainable_variables_indices for key in keys))


def kind_of(optimizer: Optimizer) -> str:
    """Return the class name of the innermost optimizer. For a `MultiOptimizer`, add the class names inside it.

    Files contain this name, because the class determines the meaning of a file's arrays.
    """
    found = base_optimizers(optimizer)
    names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in found))
    return names if len(found) == 1 else f"{type(innermost(optimizer)).__name__}({names})"


def keys_of(optimizer: Optimizer, variable: Variable) -> list[Any]:
    """Return Keras' keys of a variable, and of the variables that inner optimizers update in its place."""
    keys = [optimizer._var_key(variable)]
    for wrapper in chain_of(optimizer):
        if isinstance(wrapper, Wrapping) and wrapper.built:
            (variable,) = wrapper._variables_inside([variable])
            keys.append(optimizer._var_key(variable))
    return keys


def children(optimizer: Optimizer) -> list[Any]:
    """Return the optimizers directly inside `optimizer`: several in a `MultiOptimizer`, none in an `Adam`."""
    inner = _inner_of(optimizer)
    return list(getattr(optimizer, "optimizers", [])) if inner is None else [inner]


def _inner_of(optimizer: object) -> Any:
    if isinstance(optimizer, Wrapping):
        return optimizer.inner
    return getattr(optimizer, "inner_optimizer", None)


def get_optimizer(identifier: Any, caller: str, argument: str = "inner_optimizer") -> Any:
    """Return `identifier`, or the optimizer that has this name or config. Errors contain `caller` and `argument`."""
    if isinstance(identifier, keras.optimizers.Optimizer):
        return identifier
    if not isinstance(identifier, (str, dict)):
        is_class = isinstance(identifier, type) and issubclass(identifier, keras.optimizers.Optimizer)
        raise TypeError(
            f"`{argument}` must be a `keras.optimizers.Optimizer`, or the name or config of an optimizer. Received: "
            f"{argument}={identifier!r} "
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
    except Exception as error:  # malformed configs fail in many ways
        raise ValueError(
            f"`{argument}` must be the name or config of a Keras optimizer. Received: {argument}={identifier!r}. Use "
            f"for example `{caller}('adam')`, or pass the optimizer itself."
        ) from error


def refuse_local_gradients(outer: Wrapping, inner: Any) -> None:
    """Raise ValueError if an optimizer inside `outer` averages gradients, because `outer` needs averaged gradients."""
    if isinstance(inner, Wrapping) and inner._makes_gradients_global:
        name, other = type(outer).__name__, type(inner).__name__
        raise ValueError(
            f"`{name}` must be inside `{other}`, or `{name}` would receive the gradients of only one part of the "
            f"batch. Received: inner_optimizer={shown(inner)}. Use `{other}({name}(inner_optimizer, ...))`."
        )
    for optimizer in children(inner):
        refuse_local_gradients(outer, optimizer)


def shared_variables(optimizer: Optimizer) -> list[Variable]:
    """Return the optimizer's own variables that are equal on all replicas."""
    return list(getattr(optimizer, "_shared_variables", optimizer.variables))


def scales_loss(optimizer: Optimizer) -> bool:
    """Whether the optimizer itself, not one inside it, scales the loss."""
    return getattr(optimizer, "_scales_loss", isinstance(optimizer, keras.optimizers.LossScaleOptimizer))


def skips_overflows(optimizer: Optimizer) -> bool:
    """Whether the optimizer itself, not one inside it, skips updates if gradients overflow."""
    return getattr(optimizer, "_skips_overflows", isinstance(optimizer, keras.optimizers.LossScaleOptimizer))


def shown(optimizer: object) -> str:
    """Return the text of an optimizer in the `repr` of its wrapper."""
    if isinstance(optimizer, Wrapping):
        return repr(optimizer)
    inner = _inner_of(optimizer)
    return type(optimizer).__name__ + ("" if inner is None else f"({shown(inner)})")
