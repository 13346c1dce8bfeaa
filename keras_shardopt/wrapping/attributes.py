"""The attributes that a wrapper takes from the optimizer inside it.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._iterations` - the update counter.
    `Optimizer._model_variables_moving_average` - the weights that `SwapEMAWeights` swaps in.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.chain import innermost


def _of_innermost(name: str, default: Any) -> property:
    """Return a property that reads and writes `name` of the innermost optimizer."""

    def read(self: InnerAttributes) -> Any:
        # Keras' constructor reads and writes these attributes before an inner optimizer exists.
        return getattr(innermost(self), name, default) if self._inner else default

    def write(self: InnerAttributes, value: Any) -> None:
        if self._inner:
            # Pass through every wrapper, because each may react to the assignment.
            inner = self.inner
            setattr(inner if isinstance(inner, InnerAttributes) else innermost(inner), name, value)

    return property(read, write)


class InnerAttributes:
    """Lets Keras, callbacks and users read and write attributes of the inner optimizer through its wrapper."""

    inner: Any
    _inner: tuple[Any, ...]
    _loaded: Any

    _iterations = _of_innermost("_iterations", None)
    use_ema = _of_innermost("use_ema", False)
    ema_momentum = _of_innermost("ema_momentum", 0.99)
    ema_overwrite_frequency = _of_innermost("ema_overwrite_frequency", None)
    gradient_accumulation_steps = _of_innermost("gradient_accumulation_steps", None)
    weight_decay = _of_innermost("weight_decay", None)
    clipnorm = _of_innermost("clipnorm", None)
    global_clipnorm = _of_innermost("global_clipnorm", None)
    clipvalue = _of_innermost("clipvalue", None)
    loss_scale_factor = _of_innermost("loss_scale_factor", None)

    @property
    def iterations(self) -> keras.Variable:
        """The number of updates so far."""
        self._warn_if_read_early()
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer. An assignment changes the inner optimizer."""
        self._warn_if_read_early()
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    def _warn_if_read_early(self) -> None:
        """Warn if an unbuilt optimizer has loaded a file, because its counters do not have the file's values yet."""
        if self._loaded is not None:
            warn(
                "Call `optimizer.build(variables)` in every process before you read loaded counters and rates. Until "
                "then, counters and rates do not have the values of the loaded file."
            )

    @property
    def loss_scale(self) -> keras.Variable | float:
        """The current loss scale, as a scalar variable or a float; 1.0 without loss scaling inside."""
        inner = self.inner
        if isinstance(inner, InnerAttributes):
            return inner.loss_scale
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            return inner.dynamic_scale if inner.built else inner.initial_scale
        return 1.0 if inner.loss_scale_factor is None else inner.loss_scale_factor

    @property
    def skipped_steps(self) -> keras.Variable | int:
        """The number of updates skipped because of an overflow, as a scalar variable; 0 if nothing counts them."""
        return self.inner.skipped_steps if isinstance(self.inner, InnerAttributes) else 0

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers of an inner `keras.optimizers.MultiOptimizer`. Raises AttributeError without one."""
        several: list[keras.optimizers.Optimizer] = innermost(self).optimizers
        return several

    @property
    def _model_variables_moving_average(self) -> list[Variable]:
        averages: list[Variable] = innermost(self)._model_variables_moving_average
        return averages
