"""VariableClipping: variables whose norm stays within a limit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.numerics import Gradients, Tensor, Variable, dtype_of, factor_within, in_float32, is_sparse
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable(package="keras_shardopt")
class VariableClipping(OptimizerWrapper):
    r"""Lets the inner optimizer update, then scales down what has become too long.

    After the update each listed variable $v$ becomes

    $v \cdot \frac{c}{\max(\lVert v \rVert_D,\ c)}$

    with $c$ = `max_norm` and $\lVert v \rVert_D$ the L2 norm over the dims $D$ given for it, one norm for each
    position in the other dims. Slices within the limit keep every bit, so slices of zeros stay zero.

    Only variables that had a gradient are clipped, and where the gradient is sparse (`tf.IndexedSlices`, of an
    `Embedding` on TensorFlow) only the rows it lists, each once; if dim 0 is among $D$ a single row has no norm, and
    all rows are clipped. On JAX and PyTorch gradients are dense. Nothing else is read, so the cost is one pass over
    the variables clipped. With `gradient_accumulation_steps` the variables are clipped on every call, as Keras'
    constraints are. So they are on a step that an optimizer further inside skips (a `LossScaleOptimizer` that found an
    overflow); one further outside that skips calls nothing in here, and nothing is clipped. The state of the inner
    optimizer is not touched. With its `use_ema` the average has been taken of the weights before they are clipped, so
    that the averaged weights may be longer than `max_norm`; what an `ema_overwrite_frequency` writes into the variables
    is clipped in the same call.

    Several `VariableClipping` around each other clip in the order in which they update: the innermost first.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or the name or config of one.
        vars_to_clip_dims: which variables to clip, and the dims $D$ for each: a dict, or a list of (key, dims)
            pairs, since a `keras.Variable` cannot be the key of a dict. A key is a `keras.Variable`, a path, or a
            regular expression that matches whole paths, as in `keras.optimizers.OptimizerMap`. A path wins over
            expressions. Dims are a list or tuple of ints, which may be negative; `[]` clips each element by itself.
        max_norm: float > 0.
        name: str or None. None makes a name of the class name.

    Raises:
        TypeError: if `vars_to_clip_dims`, a key, dims or `max_norm` is of another type.
        ValueError: if `max_norm` is not > 0; when the optimizer is built, if a key names no trainable variable, two
            expressions name the same one, or a dim is out of range or given twice; if a `CrossShard` is inside,
            because replicas that list different rows would then clip different rows.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([[3.0, 4.0], [0.6, 0.8]])
        >>> sgd = keras.optimizers.SGD(0.5)
        >>> optimizer = ks.VariableClipping(sgd, [(weight, [1])], max_norm=2.5)
        >>> optimizer.apply([keras.ops.zeros((2, 2))], [weight])
        >>> [[round(float(w), 4) for w in row] for row in keras.ops.convert_to_numpy(weight)]
        [[1.5, 2.0], [0.6, 0.8]]

    References:
        `tf.contrib.opt.VariableClippingOptimizer` of TensorFlow 1. There a row listed k times in a sparse gradient
        was shortened k times; here once. There -2 was not seen to be dim 0 of a sparse gradient's matrix, and
        `max_norm` was not checked; `use_locking` and `colocate_clip_ops_with_vars` have no meaning here.
    """

    _needs_global_gradients = True
    _arguments = ("vars_to_clip_dims", "max_norm")

    _keys: list[tuple[Any, tuple[int, ...]]]
    _clip_dims: dict[Any, tuple[int, ...]]

    def __init__(
        self,
        inner_optimizer: Any,
        vars_to_clip_dims: Mapping[str, Sequence[int]] | Sequence[tuple[Variable | str, Sequence[int]]],
        max_norm: float,
        name: str | None = None,
    ) -> None:
        pairs = _pairs(vars_to_clip_dims)
        max_norm = check.real("max_norm", max_norm, above=0, finite=False)
        super().__init__(inner_optimizer, name=name)
        self.max_norm = max_norm
        self._keys = pairs
        self._clip_dims = {}

    @property
    def vars_to_clip_dims(self) -> dict[str, list[int]]:
        """The dims by path or expression, also of variables that were given as keys."""
        return {_path(key): list(dims) for key, dims in self._keys}

    def build(self, variables: Sequence[Variable]) -> None:
        """Finds the variables to clip, and builds the inner optimizer."""
        if not self.built:
            clip_dims = self._resolved(list(variables))
            super().build(variables)
            self._clip_dims = clip_dims

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Updates, then clips."""
        super().update_inner(grads, variables)
        for grad, variable in zip(grads, variables):
            dims = self._clip_dims.get(self._var_key(variable))
            if dims is None or grad is None:
                continue
            if is_sparse(grad) and 0 not in dims:
                # Rows that are listed twice are gathered twice and written twice, with the same values.
                rows = _clipped(ops.take(variable, grad.indices, axis=0), dims, self.max_norm)
                self.assign(variable, type(grad)(rows, grad.indices, grad.dense_shape))
            else:
                self.assign(variable, _clipped(ops.convert_to_tensor(variable), dims, self.max_norm))

    def _resolved(self, variables: Sequence[Variable]) -> dict[Any, tuple[int, ...]]:
        """For the key of each variable to clip, its dims, none of them negative."""
        paths = [_path(variable) for variable in variables]
        expressions = [pair for pair in self._keys if isinstance(pair[0], str) and pair[0] not in paths]
        found: dict[Any, tuple[int, ...]] = {}
        for key, dims in self._keys:
            if not isinstance(key, str) or key in paths:
                variable = self._named(key, variables, paths)
                var_key = self._var_key(variable)
                if var_key in found:
                    raise ValueError(
                        "`vars_to_clip_dims` must name each variable once. "
                        f"Received: `{_path(variable)}` twice. Leave one of its entries out."
                    )
                found[var_key] = _checked_dims(dims, variable)
        named = set(found)
        for expression, dims in expressions:
            matching = [v for v, path in zip(variables, paths) if _matches(expression, path, paths)]
            if not matching:
                raise ValueError(_unknown(expression, paths))
            for variable in matching:
                var_key = self._var_key(variable)
                if var_key in named:
                    continue
                if var_key in found:
                    raise ValueError(
                        "`vars_to_clip_dims` must name each variable once. "
                        f"Received: several expressions of {[e for e, _ in expressions]} match `{_path(variable)}`. "
                        "Give its dims under its own path, which wins over expressions."
                    )
                found[var_key] = _checked_dims(dims, variable)
        return found

    def _named(self, key: Any, variables: Sequence[Variable], paths: Sequence[str]) -> Variable:
        """The one variable that is, or has the path, `key`."""
        if isinstance(key, str):
            matching = [variable for variable, path in zip(variables, paths) if path == key]
        else:
            matching = [variable for variable in variables if self._var_key(variable) == self._var_key(key)]
        if not matching:
            raise ValueError(_unknown(_path(key), paths))
        if len(matching) > 1:
            raise ValueError(
                f"A path in `vars_to_clip_dims` must belong to one variable. Received: {key!r}, the path of "
                f"{len(matching)} variables. Use the variable itself as the key, or give the variables names."
            )
        return matching[0]


def _clipped(value: Tensor, dims: tuple[int, ...], max_norm: float) -> Tensor:
    wide = in_float32(value)
    # Without dims each element is its own norm. Frameworks disagree on what a sum over no axes is.
    norm = ops.sqrt(ops.sum(ops.square(wide), axis=dims, keepdims=True)) if dims else ops.abs(wide)
    return ops.cast(wide * factor_within(norm, max_norm), dtype_of(value))


def _pairs(vars_to_clip_dims: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """The (key, dims) pairs, copied."""
    if isinstance(vars_to_clip_dims, Mapping):
        vars_to_clip_dims = vars_to_clip_dims.items()
    elif not isinstance(vars_to_clip_dims, (list, tuple)):
        raise TypeError(
            "`vars_to_clip_dims` must be a dict of dims by path, or a list of (variable, dims) pairs. "
            f"Received: vars_to_clip_dims={vars_to_clip_dims!r}"
        )
    pairs = []
    for pair in vars_to_clip_dims:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(f"`vars_to_clip_dims` must list (key, dims) pairs. Received: {pair!r} among them.")
        key, dims = pair
        if not (isinstance(key, str) or hasattr(key, "assign")):
            raise TypeError(
                "A key of `vars_to_clip_dims` must be a variable, a path or a regular expression. "
                f"Received: {key!r} (of type {type(key).__name__})."
            )
        if not isinstance(dims, (list, tuple)) or any(isinstance(d, bool) or not isinstance(d, int) for d in dims):
            raise TypeError(
                "The dims in `vars_to_clip_dims` must be a list or tuple of ints. "
                f"Received: {dims!r} for {_path(key)!r}. Use for example `[0]`, or `[]` to clip each element by itself."
            )
        pairs.append((key, tuple(dims)))
    return pairs


def _checked_dims(dims: tuple[int, ...], variable: Variable) -> tuple[int, ...]:
    rank = len(variable.shape)
    positive = tuple(dim + rank if dim < 0 else dim for dim in dims)
    if any(not 0 <= dim < rank for dim in positive) or len(set(positive)) < len(positive):
        raise ValueError(
            f"The dims in `vars_to_clip_dims` must be different ones of the variable's {rank}. "
            f"Received: {list(dims)} for `{_path(variable)}` of shape {tuple(variable.shape)}."
        )
    return positive


def _matches(expression: str, path: str, paths: Sequence[str]) -> bool:
    try:
        return re.fullmatch(expression, path) is not None
    except re.error as error:
        raise ValueError(f"{_unknown(expression, paths)} As an expression it is wrong: {error}.") from error


def _unknown(key: str, paths: Sequence[str]) -> str:
    return (
        "Each key of `vars_to_clip_dims` must name a trainable variable: be one, be its path, or be a regular "
        f"expression that matches all of its path. Received: {key!r}, with the trainable variables {list(paths)}."
    )


def _path(key: Any) -> str:
    return key if isinstance(key, str) else str(getattr(key, "path", None) or key.name)
