"""AutomaticLossScaler: a loss scale that is adjusted from the gradients of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends import norms
from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Gradients, Tensor, Variable, values_of
from keras_shardopt.optimizers import scale_algorithms


@keras.saving.register_keras_serializable(package="keras_shardopt")
class AutomaticLossScaler:
    r"""Adjusts a loss scale so that gradients use float16's range without overflow.

    An *overflow* is a gradient with a NaN or an infinite element. With $s$ the scale, each call of `update` computes

    - `"Backoff"`: on an overflow $s \leftarrow s / f$; otherwise, on each $w$-th good step since the last overflow
      (or the start), $s \leftarrow s \cdot f$; both kept within `scale_min` and `scale_max`. $f$ = `step_factor`,
      $w$ = `step_window`. $s$ starts at `scale_max`.
    - `"LogMax"`: with $a$ the largest absolute value among the unscaled gradients and $x = \log_2 a$, running means
      $\mu$ of $x$ (decay `beta1`), $m$ of $x$ and $q$ of $x^2$ (decay `beta2`), each corrected for its start at 0,
      and $\sigma = \sqrt{\max(0, q - m^2)}$: $s \leftarrow 2^{16 - (\mu + z \sigma)}$ within the bounds, with
      $z$ = `overflow_std_dev`. If $x$ is normally distributed, 99.9 % of the gradients stay below $2^{16}$. $s$
      starts at 1, or at the bound nearest to 1.

    This class repairs two bugs of the original LogMax. On an overflow the original used $x = 2^{\text{log\_max}}$
    instead of the logarithm, so the scale stayed at `scale_min` for about 11,860 steps. Here $x$ = `log_max`. Gradients
    of zeros made the original's scale NaN permanently. Here they double the scale, because zeros may be underflow, and
    leave the means unchanged.

    Pass a scaler to `LossScaling` or `MixedPrecision`, or use it without an optimizer. The scaler's state is in
    variables. The methods work in compiled steps on TensorFlow and PyTorch. On JAX, use `next_state`, a pure function.

    Args:
        algorithm: "Backoff" (default) or "LogMax"; case is ignored.
        params: dict or None. Parameters of the algorithm, with the originals' defaults:

            - both: `scale_min` 1.0, `scale_max` 16384.0 (floats > 0);
            - "Backoff": `step_factor` 2.0 (float > 1), `step_window` 2000 (int >= 1);
            - "LogMax": `log_max` 16.0 (float), `beta1` 0.99 and `beta2` 0.999 (floats in [0, 1)),
              `overflow_std_dev` 3.09 (float >= 0).

        faithful: bool. True reproduces the original's bugs and skips the range checks of `params`. False is the
            default.

    Raises:
        TypeError: if `algorithm` is not a str or `params` not a dict.
        ValueError: if `algorithm` or a key of `params` is unknown, or a value is out of range or of the wrong type
            (an int is not accepted as a float, as in OpenSeq2Seq).

    Example:
        >>> import keras, keras_shardopt as ks
        >>> scaler = ks.AutomaticLossScaler("Backoff", {"scale_max": 1024.0})
        >>> grads = [keras.ops.convert_to_tensor([1.0, float("inf")]), None]
        >>> has_nan, amax = scaler.check_grads(grads)
        >>> bool(has_nan), float(amax)
        (False, inf)
        >>> scaler.update(has_nan, amax)
        >>> float(scaler.loss_scale)
        512.0

    References:
        `automatic_loss_scaler.py` of OpenSeq2Seq. LogMax is from Mikami et al., "Massively Distributed SGD:
        ImageNet/ResNet-50 Training in a Flash", 2018. The original Backoff incremented and read its counter in an
        undefined order, and nearly always behaved as stated above.
    """

    def __init__(
        self, algorithm: str = "Backoff", params: Mapping[str, Any] | None = None, faithful: bool = False
    ) -> None:
        if not isinstance(algorithm, str):
            raise TypeError(f'`algorithm` must be "Backoff" or "LogMax". Received: algorithm={algorithm!r}')
        key = algorithm.strip().lower()
        if key not in scale_algorithms.NAMES:
            raise ValueError(f'`algorithm` must be "Backoff" or "LogMax". Received: algorithm={algorithm!r}')
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"`params` must be a dict or None. Received: params={params!r}")
        self.algorithm = scale_algorithms.NAMES[key]
        self.faithful = check.flag("faithful", faithful)
        self.params = scale_algorithms.checked_params(self.algorithm, params or {}, self.faithful)
        self._variables: list[Variable] | None = None

    # -- pure functions of the state -----------------------------------------------------------------------------

    def initial_state(self) -> list[tuple[str, float, str]]:
        """Returns the name, start value and dtype of each scalar of the state. The first scalar is the scale."""
        return scale_algorithms.initial_state(self.algorithm, self.params, self.faithful)

    def next_state(self, state: Sequence[Tensor], has_nan: Any, amax: Any) -> list[Tensor]:
        """Returns the state after a step, as tensors in the order of `initial_state()`.

        Args:
            state: one scalar tensor per row of `initial_state()`.
            has_nan: bool, or a scalar bool tensor: whether a gradient has a NaN.
            amax: float, or a scalar tensor: the largest absolute value of the unscaled gradients.
        """
        has_nan = ops.convert_to_tensor(has_nan, "bool")
        amax = ops.cast(ops.convert_to_tensor(amax), "float32")
        state = [ops.convert_to_tensor(value) for value in state]
        given = (self.algorithm, self.params, self.faithful)
        return scale_algorithms.next_state(*given, state, overflow(has_nan, amax), amax)

    # -- methods that read or change the state -------------------------------------------------------------------

    def build(self, add_variable: Callable[[str, float, str], Variable]) -> None:
        """Creates the variables of the state with `add_variable(name, start, dtype)`. The optimizer calls this."""
        if self._variables is not None:
            raise ValueError(
                "An `AutomaticLossScaler` can be used by one optimizer only. Received: an object that another "
                f"optimizer uses. Create `AutomaticLossScaler({self.algorithm!r}, {self.params!r})`."
            )
        self._variables = [add_variable(*row) for row in self.initial_state()]

    @property
    def _state(self) -> list[Variable]:
        if self._variables is None:
            self.build(_variable)
        assert self._variables is not None
        return self._variables

    @property
    def loss_scale(self) -> Variable:
        """The current scale: a scalar float32 variable."""
        return self._state[0]

    def update(self, has_nan: Any, amax: Any) -> None:
        """Advances the state by one step. See `next_state` for the arguments."""
        state = self._state
        if self._may_only_count() and not has_nan and float(amax) < float("inf"):
            state[-1].assign_add(1)
            return
        for variable, value in zip(state, self.next_state(state, has_nan, amax)):
            variable.assign(value)

    def _may_only_count(self) -> bool:
        """Whether a step without overflow only adds 1 to the counter of good steps. False if reading it is slow."""
        if self.algorithm != "Backoff":
            return False
        counter = self._state[-1]
        if runtime.version(counter) is None or not runtime.is_cheap_to_read(value := ops.convert_to_tensor(counter)):
            return False
        return int(value) + 1 < self.params["step_window"]

    def _count_if_good(self, grads: Gradients) -> bool:
        """If a fast check shows no overflow and no change of the scale, counts a good step and returns True."""
        if type(self) is not AutomaticLossScaler or not self._may_only_count() or not _are_surely_finite(grads):
            return False
        self._state[-1].assign_add(1)
        return True

    def _fast_check(self, grads: Gradients) -> tuple[Tensor, Tensor]:
        """Finds overflows like `check_grads`, but faster with "Backoff", which does not need the largest value."""
        if self.algorithm == "Backoff" and type(self) is AutomaticLossScaler:
            if _are_surely_finite(grads):
                return _nothing_found()
            given = [values_of(grad) for grad in grads if grad is not None]
            if given and (found := norms.any_not_finite(given)) is not None:
                return found, _nothing_found()[1]
        return self.check_grads(grads)

    def check_grads(self, grads: Gradients) -> tuple[Tensor, Tensor]:
        """Returns whether any gradient has a NaN, and the largest absolute value (undefined if one has a NaN).

        Args:
            grads: tensors of any shapes and dtypes. None entries are ignored. Rows of `tf.IndexedSlices` count
                individually.

        Returns:
            A pair of scalar tensors, bool and float32: (False, -inf) without gradients.
        """
        return check_grads(grads)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"algorithm": self.algorithm, "params": dict(self.params), "faithful": self.faithful}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutomaticLossScaler:
        """Reverses `get_config`."""
        return cls(**config)

    def __repr__(self) -> str:
        faithful = ", faithful=True" if self.faithful else ""
        return f"AutomaticLossScaler({self.algorithm!r}, {self.params!r}{faithful})"


def check_grads(grads: Gradients) -> tuple[Tensor, Tensor]:
    """Returns whether any gradient has a NaN, and the largest absolute value (undefined if one has a NaN)."""
    values = [values_of(grad) for grad in grads if grad is not None]
    values = [value for value in values if 0 not in value.shape]
    if not values:
        return ops.convert_to_tensor(False, "bool"), ops.convert_to_tensor(float("-inf"), "float32")
    return norms.largest(values)


def _are_surely_finite(grads: Gradients) -> bool:
    given = [grad for grad in grads if grad is not None]
    return bool(given) and runtime.is_cheap_to_read(given[0]) and norms.are_surely_finite(given)


def _nothing_found() -> tuple[Tensor, Tensor]:
    return ops.convert_to_tensor(False, "bool"), ops.convert_to_tensor(0.0, "float32")


def overflow(has_nan: Tensor, amax: Tensor) -> Tensor:
    """Whether an update must be skipped, from the results of `check_grads`."""
    return ops.logical_or(has_nan, amax == float("inf"))


def _variable(name: str, start: float, dtype: str) -> Variable:
    return keras.Variable(start, dtype=dtype, trainable=False, autocast=False, name=name)
