"""TensorFlow 1's two phases of an update: gradients that may be changed, and then applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.replica_transform import unscaled_gradients
from keras_shardopt.wrapping.chain import base_optimizers
from keras_shardopt.wrapping.rollback import note_before_assignment


class TwoPhases:
    """`compute_gradients` and `minimize` for an `OptimizerWrapper` whose replicas have gradients of their own."""

    axis_name: str
    built: bool
    inner: Any
    loss_scale: Any
    _computed: bool  # whether gradients come from here, and so unscaled
    apply_gradients: Any
    _trainable_variables: list[Variable]

    def compute_gradients(
        self, loss: Callable[[], Tensor], var_list: Sequence[Variable] | None = None
    ) -> list[tuple[Tensor | None, Variable]]:
        """The first phase of `minimize`: this replica's gradients, which may be changed before `apply_gradients`.

        They are the gradients of what `loss` returns, before any reduction wherever replicas are told apart (under a
        `keras.distribution`, and where DDP owns the weights, they are global). So the loss is to be the mean over
        this replica's examples, and the gradients are in its units, also if an inner optimizer scales the loss: that
        is done and undone here, and done again in `apply_gradients`. On TensorFlow `keras.losses` divide by the
        number of replicas, and their gradients are as much smaller; where the loss is a bare mean, the units are
        those of the other backends.

        Whatever `loss` assigns (moving statistics, seeds) is assigned once. With an inner optimizer that scales the
        loss, call `scale_loss` before custom gradients, as usual; it also distinguishes the two kinds.

        Args:
            loss: a function without arguments that returns a scalar tensor.
            var_list: the trainable variables to differentiate by; None for those that the optimizer was built on.

        Returns:
            A list of (gradient, variable) pairs in the order of `var_list`. The gradient is None (on JAX zeros) for a
            variable that the loss does not depend on.

        Raises:
            TypeError: if `loss` is not a function.
            ValueError: if `var_list` is needed and not given, or holds variables that are not trainable; if the loss
                is not a scalar.

        Example:
            >>> import keras, keras_shardopt as ks
            >>> weight = keras.Variable([3.0, 4.0])
            >>> optimizer = ks.CrossShard(keras.optimizers.SGD(1.0))
            >>> def loss():
            ...     return keras.ops.sum(keras.ops.square(weight)) / 2
            >>> grads_and_vars = optimizer.compute_gradients(loss, [weight])
            >>> iterations = optimizer.apply_gradients([(grad / 2, v) for grad, v in grads_and_vars])
            >>> [float(w) for w in keras.ops.convert_to_numpy(weight)]
            [1.5, 2.0]
        """
        if not callable(loss):
            raise TypeError(
                "`loss` must be a function without arguments that returns a scalar: a tensor does not show how it was "
                f"made, so there is nothing to differentiate. Received: loss={loss!r} (of type {type(loss).__name__}). "
                "Use for example `minimize(lambda: loss_fn(y, model(x, training=True)), model.trainable_variables)`."
            )
        variables = self._variables_to_differentiate(var_list)
        placement.check(variables, base_optimizers(self))

        def scaled() -> tuple[Tensor, None]:
            return self.inner.scale_loss(scalar_loss(loss())), None

        grads, _ = runtime.value_and_grad(scaled, variables, self.axis_name, note_before_assignment)
        grads = unscaled_gradients(grads, variables, self.loss_scale)
        self._computed = True
        return list(zip(grads, variables))

    def minimize(self, loss: Callable[[], Tensor], var_list: Sequence[Variable] | None = None) -> Any:
        """Computes gradients as `compute_gradients` does, and applies them as `apply_gradients` does.

        Args:
            loss: a function without arguments that returns a scalar tensor: the mean over this replica's examples.
            var_list: the trainable variables to update; None for those that the optimizer was built on.

        Returns:
            The update counter.

        Raises:
            TypeError: if `loss` is not a function.
            ValueError: as `compute_gradients`.

        Example:
            >>> import keras, keras_shardopt as ks
            >>> weight = keras.Variable(3.0)
            >>> optimizer = ks.CrossShard(keras.optimizers.SGD(0.5))
            >>> iterations = optimizer.minimize(lambda: keras.ops.square(weight), [weight])
            >>> float(keras.ops.convert_to_numpy(weight))
            0.0
        """
        return self.apply_gradients(self.compute_gradients(loss, var_list))

    def _variables_to_differentiate(self, var_list: Sequence[Variable] | None) -> list[Variable]:
        if var_list is None:
            if not self.built:
                raise ValueError(
                    "`var_list` must be given, or the optimizer built before. "
                    "Use for example `minimize(loss, model.trainable_variables)`."
                )
            return list(self._trainable_variables)
        variables = list(var_list)
        frozen = [getattr(v, "path", str(v)) for v in variables if not getattr(v, "trainable", True)]
        if frozen or not variables:
            raise ValueError(
                f"`var_list` must hold trainable variables. Received: {frozen or variables}"
                + (", which are not. " if frozen else ". ")
                + "Use for example `model.trainable_variables`."
            )
        return variables


def scalar_loss(value: Any) -> Tensor:
    """What a loss function has returned, if it is a scalar."""
    value = keras.ops.convert_to_tensor(value)
    if keras.ops.ndim(value):
        raise ValueError(
            f"`loss` must return a scalar. Received: a tensor of shape {tuple(value.shape)}. "
            "Use for example `keras.ops.mean(...)` of it."
        )
    return value
