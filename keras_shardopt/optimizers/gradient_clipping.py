"""Clipping by global norm: GradientClipping, and two functions for custom training loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt import numerics
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.norms import global_norm
from keras_shardopt.numerics import (
    Gradients,
    Tensor,
    Variable,
    clipped_to,
    dtype_of,
    factor_within,
    in_float32,
    is_sparse,
    like_variable,
    overwrites_variable,
    times,
)
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable(package="keras_shardopt")
class GradientClipping(OptimizerWrapper):
    r"""Scales all gradients by one factor to limit their global norm to `clip_gradients`.

    With $n = \sqrt{\sum_i \lVert g_i \rVert^2}$ over all gradients and $c$ = `clip_gradients`, the inner optimizer
    gets $g_i \cdot \min(1, c / n)$. The norm and the product are computed in float32, and each result has the dtype of
    its variable. Gradients within the limit are bitwise unchanged. None gradients are ignored. The rows of a sparse
    gradient (`tf.IndexedSlices`) count individually, even if they repeat an index.

    If a gradient is infinite, $n$ is infinite and the factor is 0: finite elements become 0 and the infinite one NaN.
    A check for overflow in an inner optimizer still detects the NaN. (Keras' `global_clipnorm` makes all elements NaN.)
    A NaN makes all elements NaN.

    Inside `CrossShard` gradients are global, so the norm is that of the whole batch. The limit applies to unscaled
    gradients: if the inner optimizer scales the loss, the limit is scaled as well. If the inner optimizer accumulates
    (its `gradient_accumulation_steps`), each micro-batch's gradient is clipped before it is added. The mean is then
    within the limit, but it is not the clipped mean. To clip the accumulated gradient, use `global_clipnorm` of the
    inner optimizer, or `Tower` around this wrapper.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or its name or config.
        clip_gradients: float > 0. The maximum global norm.
        name: str or None (default: derived from the class name).

    Raises:
        TypeError: if `clip_gradients` is not a number.
        ValueError: if `clip_gradients` is not > 0; if a `CrossShard` is inside, because the norm would be that of one
            replica's gradients.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer = ks.GradientClipping(keras.optimizers.SGD(1.0), clip_gradients=0.5)
        >>> optimizer.apply([keras.ops.convert_to_tensor([3.0, 4.0])], [weight])
        >>> [round(float(w), 4) for w in keras.ops.convert_to_numpy(weight)]
        [0.7, 1.6]

    References:
        The argument `clip_gradients` of OpenSeq2Seq's `optimize_loss`. It failed with None gradients and scalar
        variables. Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """

    _needs_global_gradients = True
    _shard_unit = "element"
    _sums_over_slices = True
    _arguments = ("clip_gradients",)

    def __init__(self, inner_optimizer: Any, clip_gradients: float, name: str | None = None) -> None:
        fix = "Remove `GradientClipping` to disable clipping."
        clip_gradients = check.real("clip_gradients", clip_gradients, above=0, finite=False, fix=fix)
        super().__init__(inner_optimizer, name=name)
        self.clip_gradients = clip_gradients

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Clips all gradients by their global norm."""
        result = list(grads)
        clipped = [i for i, variable in enumerate(variables) if not overwrites_variable(variable)]
        norm = global_norm([grads[i] for i in clipped])
        norm = norm_over_replicas(norm) if self._scope.holds_slices else norm
        factor = factor_within(norm, ops.cast(self.clip_gradients * self._incoming_scale(), dtype_of(norm)))
        factors = [None if overwrites_variable(variable) else factor for variable in variables]
        if self._delegates_factors(grads, variables, factors):
            return result
        for i in clipped:
            result[i] = like_variable(times(grads[i], factor), variables[i])
        return result


def norm_over_replicas(norm: Tensor) -> Tensor:
    """Returns the norm of all gradients, from the norm of the slices of gradients that this replica holds."""
    (total,) = runtime.communicator("batch").all_reduce([ops.reshape(ops.square(norm), (1,))], "sum")
    return ops.sqrt(total[0])


def clip_by_global_norm(
    t_list: Sequence[Tensor | None], clip_norm: float | Tensor, use_norm: Tensor | None = None
) -> tuple[list[Tensor | None], Tensor]:
    r"""Scales all tensors by one factor to limit their global norm to `clip_norm`.

    With $n$ the global norm and $c$ = `clip_norm`, each tensor $t$ becomes $t \cdot \min(1, c / n)$. Tensors within
    the limit are bitwise unchanged. The product is computed in float32 and has the dtype of its tensor.

    An infinite element makes $n$ infinite and the factor 0: finite elements become 0 and the infinite one NaN. A later
    check for overflow still detects the NaN. A NaN makes all elements NaN.

    Args:
        t_list: a list or tuple of tensors of any shapes. None entries stay None. The rows of `tf.IndexedSlices` are
            scaled, and count individually in the norm.
        clip_norm: a number >= 0, or a scalar tensor.
        use_norm: the global norm if it is already computed; None computes it.

    Returns:
        A pair: the list of scaled tensors, and the global norm before scaling, a scalar.

    Raises:
        TypeError: if `t_list` is not a list or tuple.
        ValueError: if `clip_norm` is a number < 0.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> gradient = keras.ops.convert_to_tensor([3.0, 4.0])
        >>> clipped, norm = ks.clip_by_global_norm([gradient, None], 1.0)
        >>> float(norm), [round(float(t), 4) for t in clipped[0]], clipped[1]
        (5.0, [0.6, 0.8], None)

    References:
        `clip_by_global_norm` of OpenSeq2Seq's `optimizers.py`. It follows `tf.clip_by_global_norm`, but returns zeros
        instead of NaN next to an infinite element. There, None entries and scalars failed, and `use_norm` was
        required.
    """
    is_list = isinstance(t_list, (list, tuple))
    odd = [t for t in t_list if t is not None and not _is_numbers(t)] if is_list else []
    if odd or not is_list:
        what = f"a list with {check.with_article(type(odd[0]).__name__)}" if odd else check.with_article(t_list)
        raise TypeError(
            f"`t_list` must be a list or tuple of tensors and None. Received: {what}. Put a single tensor in a list."
        )
    _check_limit("clip_norm", clip_norm)
    if use_norm is not None and not _is_scalar(use_norm):
        raise TypeError(f"`use_norm` must be a scalar tensor, a number or None. Received: use_norm={use_norm!r}")
    if isinstance(use_norm, Real):
        use_norm = float(use_norm)
    found = numerics.global_norm(t_list) if use_norm is None else in_float32(ops.convert_to_tensor(use_norm))
    return clipped_to(t_list, clip_norm, found), found


def clip_gradients_by_norm(
    grads_and_vars: Iterable[tuple[Tensor | None, Variable]], clip_gradients: float | Tensor
) -> list[tuple[Tensor | None, Variable]]:
    """Clips the gradients of (gradient, variable) pairs by their global norm.

    The function clips like `clip_by_global_norm`; each gradient then has the dtype of its variable. Call it before an
    optimizer applies the gradients, and after replicas have averaged them. `GradientClipping` does the same inside an
    optimizer.

    Args:
        grads_and_vars: pairs of a gradient (or None) and its variable.
        clip_gradients: a number >= 0, or a scalar tensor: the maximum global norm.

    Returns:
        A list of such pairs, with clipped gradients.

    Raises:
        ValueError: if `clip_gradients` is a number < 0.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0, 2.0])
        >>> pairs = [(keras.ops.convert_to_tensor([3.0, 4.0]), weight)]
        >>> ((grad, _),) = ks.clip_gradients_by_norm(pairs, 1.0)
        >>> [round(float(g), 4) for g in grad]
        [0.6, 0.8]

    References:
        `_clip_gradients_by_norm` of OpenSeq2Seq's `optimizers.py`.
    """
    _check_limit("clip_gradients", clip_gradients)
    listed = isinstance(grads_and_vars, Iterable) and _rank(grads_and_vars) is None
    pairs: list[Any] = list(grads_and_vars) if listed else [None]
    for pair in pairs:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_pair(*pair)):
            what = repr(grads_and_vars) if pair is None else f"the entry {pair!r}"
            raise TypeError(f"`grads_and_vars` must list (gradient, variable) pairs. Received: {what}")
    clipped, _ = clip_by_global_norm([grad for grad, _ in pairs], clip_gradients)
    return [(like_variable(grad, variable), variable) for grad, (_, variable) in zip(clipped, pairs)]


def _check_limit(name: str, limit: Any) -> None:
    if isinstance(limit, Real):
        check.real(name, limit, at_least=0, finite=False)
    elif not _is_scalar(limit):
        raise TypeError(f"`{name}` must be a number or a scalar tensor. Received: {name}={limit!r}")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Real) and not isinstance(value, bool):
        return check.is_finite(value) or isinstance(value, float)
    return _rank(value) == 0 and _is_numbers(value)


def _rank(value: Any) -> int | None:
    """Returns the rank of a tensor, variable or array; None for other values."""
    shape = getattr(value, "shape", None)
    try:
        return None if shape is None or not hasattr(value, "dtype") else len(shape)
    except (TypeError, ValueError):  # TensorFlow: the rank is unknown while tracing
        return 0


def _is_numbers(value: Any) -> bool:
    """Whether the value is a tensor, sparse or not, or can be converted to one."""
    if is_sparse(value) or ops.is_tensor(value) or isinstance(value, keras.Variable):
        return True
    try:
        array = np.asarray(value)
    except Exception:  # raised for lists of unequal lengths, or by a custom `__array__`
        return False
    return array.dtype.kind in "fiu" or "float" in str(array.dtype)


def _is_pair(grad: Any, variable: Any) -> bool:
    return (grad is None or _is_numbers(grad)) and _rank(variable) is not None
