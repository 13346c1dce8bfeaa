"""Reports of an optimizer that skips updates with NaN or infinity."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import UNKNOWN, Gradients, Variable, path_of
from keras_shardopt.update.nonfinite import SkipNonFinite
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class ReportsNonFinite(OptimizerWrapper):
    """Counts updates skipped because of NaN or infinity, and raises an error for them with `on_nonfinite="raise"`."""

    on_nonfinite: str
    _nonfinite: SkipNonFinite | None
    _skips_inside: bool

    @property
    def skipped_steps(self) -> keras.Variable | int:
        """The number of updates skipped because a gradient was not finite: a scalar variable, or 0."""
        if self._nonfinite is None or self._skips_inside:
            return super().skipped_steps
        return self._nonfinite.skipped

    @property
    def last_nonfinite(self) -> tuple[int | None, str | None] | None:
        """The replica, and the path of the first variable, with a non-finite gradient in the last skipped update.

        None if all gradients were finite so far, and with `on_nonfinite="ignore"`. The replica is None if gradients
        were reduced before the optimizer received them. Reading this property waits for the devices.
        """
        replica, position = (UNKNOWN, UNKNOWN) if self._nonfinite is None else self._nonfinite.last()
        if position == UNKNOWN:
            return None
        return (None if replica == UNKNOWN else replica), self._names()[position]

    def check_finite(self, from_now: bool = False) -> None:
        """Raises an error if an update was skipped since the last call. Compiled JAX steps cannot raise this error.

        With `from_now`, never raises: later calls ignore the updates skipped until now.

        Raises:
            FloatingPointError: with the names of the replica and the variable; only with `on_nonfinite="raise"`.
        """
        if self._nonfinite is not None and self.on_nonfinite == "raise":
            self._nonfinite.report(self._names(), from_now)

    def _names(self) -> list[str]:
        return list(map(path_of, self._trainable_variables))

    @runtime.no_autograph
    def apply(self, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """Updates the variables.

        Raises:
            FloatingPointError: with `on_nonfinite="raise"`, if a gradient is not finite.
        """
        if self._nonfinite is None or self.on_nonfinite != "raise":
            super().apply(grads, trainable_variables)
            return
        before = keras.ops.copy(keras.ops.convert_to_tensor(self._nonfinite.skipped))
        super().apply(grads, trainable_variables)
        put_back = () if self._rollback is None else self._rollback.variables
        runtime.no_compile(self._nonfinite.raise_if_more, before, self._names(), put_back)
