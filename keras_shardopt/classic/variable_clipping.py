"""VariableClipping: limits the norms of variables."""

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
    r"""Runs the inner optimizer's update, then rescales weights with a norm above the limit.

    After the update, each variable $v$ in `vars_to_clip_dims` becomes

    $v \cdot \frac{c}{\max(\lVert v \rVert_D,\ c)}$

    with $c$ = `max_norm` and the L2 norm $\lVert v \rVert_D$ over the variable's dims $D$, one norm per position in
    the other dims. Slices within the limit do not change.

    - Variables without a gradient are not clipped. With a sparse gradient (`tf.IndexedSlices`, from an `Embedding` on
      TensorFlow), only the rows in the gradient are clipped. If $D$ contains dim 0, all rows are clipped.
    - With `gradient_accumulation_steps` of the inner optimizer, every call clips, as Keras' constraints do. A call
      also clips if an inner optimizer skips the update, but not if an outer optimizer skips it.
    - With `use_ema` of the inner optimizer, averages use the weights before clipping, so they may exceed `max_norm`.
      Averages that `ema_overwrite_frequency` writes into the variables are clipped in the same call.
    - Nested `VariableClipping` optimizers clip from the innermost to the outermost.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, its name or config.
        vars_to_clip_dims: dict of dims $D$ by key, or list of (key, dims) pairs. A key is a `keras.Variable` (in pairs
            only, because a variable cannot be a dict key), its path, or a regular expression that matches whole paths,
            as in `keras.optimizers.OptimizerMap`. A path takes precedence over expressions. Dims are a list or tuple
            of ints, also negative; `[]` clips each element.
        max_norm: float > 0.
        name: str or None. None derives a name from the class.

    Raises:
        TypeError: if `vars_to_clip_dims`, a key, dims or `max_norm` has the wrong type.
        ValueError: if `max_norm` is not > 0, or a `CrossShard` is inside, because replicas would clip the rows of
            their local gradients. In `build`: if a key matches no trainable variable, several expressions match a
            variable, or a dim is out of range or repeated.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([[3.0, 4.0], [0.6, 0.8]])
        >>> sgd = keras.optimizers.SGD(0.5)
        >>> optimizer = ks.VariableClipping(sgd, [(weight, [1])], max_norm=2.5)
        >>> optimizer.apply([keras.ops.zeros((2, 2))], [weight])
        >>> [[round(float(w), 4) for w in row] for row in keras.ops.convert_to_numpy(weight)]
        [[1.5, 2.0], [0.6, 0.8]]

    References:
        `tf.contrib.opt.VariableClippingOptimizer` of TensorFlow 1. It clipped a row k times if a sparse gradient listed
        it k times, and did not handle dim -2 of a sparse gradient's matrix. Its `use_locking` and
        `colocate_clip_ops_with_vars` do not exist here.
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
        """The dims to clip, by path or regular expression. A variable that was passed as a key appears as its path."""
        return {_path(key): list(dims) for key, dims in self._keys}

    def build(self, variables: Sequence[Variable]) -> None:
        """Find the variables to clip, and build the inner optimizer."""
        if not self.built:
            clip_dims = self._resolved(list(variables))
            super().build(variables)
            self._clip_dims = clip_dims

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Update through the inner optimizer, then clip the variables."""
        super().update_inner(grads, variables)
        for grad, variable in zip(grads, variables):
            dims = self._clip_dims.get(self._var_key(variable))
            if dims is None or grad is None:
                continue
            if is_sparse(grad) and 0 not in dims:
                # A repeated index does no harm: its row is assigned several times, with the same values.
                rows = _clipped(ops.take(variable, grad.indices, axis=0), dims, self.max_norm)
                self.assign(variable, type(grad)(rows, grad.indices, grad.dense_shape))
            else:
                self.assign(variable, _clipped(ops.convert_to_tensor(variable), dims, self.max_norm))

    def _resolved(self, variables: Sequence[Variable]) -> dict[Any, tuple[int, ...]]:
        """Return the dims of each variable to clip, as nonnegative ints. The keys are the variables' `_var_key`."""
        paths = [_path(variable) for variable in variables]
        expressions = [pair for pair in self._keys if isinstance(pair[0], str) and pair[0] not in paths]
        found: dict[Any, tuple[int, ...]] = {}
        for key, dims in self._keys:
            if not isinstance(key, str) or key in paths:
                variable = self._named(key, variables, paths)
                var_key = self._var_key(variable)
                if var_key in found:
                    raise ValueError(
                        f"`vars_to_clip_dims` must name each variable once. Received: `{_path(variable)}` twice. "
                        "Remove one of the two entries."
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
                        "`vars_to_clip_dims` must name each variable once. Received: several expressions of "
                        f"{[e for e, _ in expressions]} match `{_path(variable)}`. Use the variable's path as the key: "
                        "a path takes precedence over expressions."
                    )
                found[var_key] = _checked_dims(dims, variable)
        return found

    def _named(self, key: Any, variables: Sequence[Variable], paths: Sequence[str]) -> Variable:
        """Return `key` if it is a trainable variable; otherwise the trainable variable with the path `key`."""
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
    # Without dims, use `ops.abs`, because frameworks differ in a sum over no axes.
    norm = ops.sqrt(ops.sum(ops.square(wide), axis=dims, keepdims=True)) if dims else ops.abs(wide)
    return ops.cast(wide * factor_within(norm, max_norm), dtype_of(value))


def _pairs(vars_to_clip_dims: Any) -> list[tuple[Any, tuple[int, ...]]]:
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
            raise TypeError(f"`vars_to_clip_dims` must list (key, dims) pairs. Received: the entry {pair!r}.")
        key, dims = pair
        if not (isinstance(key, str) or hasattr(key, "assign")):
            raise TypeError(
                "A key of `vars_to_clip_dims` must be a variable, a path or a regular expression. "
                f"Received: {key!r} (of type {type(key).__name__})."
            )
        if not isinstance(dims, (list, tuple)) or any(isinstance(d, bool) or not isinstance(d, int) for d in dims):
            raise TypeError(
                "The dims in `vars_to_clip_dims` must be a list or tuple of ints. "
                f"Received: {dims!r} for {_path(key)!r}. Use for example `[0]`, or `[]` to clip each element."
            )
        pairs.append((key, tuple(dims)))
    return pairs


def _checked_dims(dims: tuple[int, ...], variable: Variable) -> tuple[int, ...]:
    rank = len(variable.shape)
    positive = tuple(dim + rank if dim < 0 else dim for dim in dims)
    if any(not 0 <= dim < rank for dim in positive) or len(set(positive)) < len(positive):
        raise ValueError(
            f"The dims in `vars_to_clip_dims` must be distinct, and in the range of the variable's {rank} dims. "
            f"Received: {list(dims)} for `{_path(variable)}` of shape {tuple(variable.shape)}."
        )
    return positive


def _matches(expression: str, path: str, paths: Sequence[str]) -> bool:
    try:
        return re.fullmatch(expression, path) is not None
    except re.error as error:
        raise ValueError(f"{_unknown(expression, paths)} Regular expression error: {error}.") from error


def _unknown(key: str, paths: Sequence[str]) -> str:
    return (
        "Each key of `vars_to_clip_dims` must name a trainable variable: the variable, its path, or a regular "
        f"expression that matches the whole path. Received: {key!r}, with the trainable variables {list(paths)}."
    )


def _path(key: Any) -> str:
    return key if isinstance(key, str) else str(getattr(key, "path", None) or key.name)
