"""TensorFlow 1's two phases of an update: compute gradients, then apply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.numerics import Tensor, Variable, path_of
from keras_shardopt.update.units import unscaled_gradients
from keras_shardopt.wrapping.chain import base_optimizers
from keras_shardopt.wrapping.rollback import save_before_assignment


class TwoPhases:
    """A mixin with TensorFlow 1's `compute_gradients` and `minimize` for `CrossShard`."""

    axis_name: str
    built: bool
    inner: Any
    loss_scale: Any
    _computed: bool  # whether gradients come from `compute_gradients`, and are unscaled
    apply_gradients: Any
    _trainable_variables: list[Variable]

    def compute_gradients(
        self, loss: Callable[[], Tensor], var_list: Sequence[Variable] | None = None
    ) -> list[tuple[Tensor | None, Variable]]:
        """Computes this replica's gradients, the first phase of `minimize`. You may change these before you apply them.

        They are the gradients of this replica's `loss`, before any reduction. (Under a `keras.distribution`, and under
        PyTorch's DDP, they are global.) So `loss` should return the mean over this replica's examples. Gradients
        are unscaled, even if an inner optimizer scales the loss: `apply_gradients` scales them again. On TensorFlow,
        `keras.losses` divide by the number of replicas, and so their gradients are smaller by this factor. With a plain
        `ops.mean`, they are the same as on other backends.

        Assignments in `loss` (moving statistics, seeds) run once. If an inner optimizer scales the loss, gradients
        from other code need `scale_loss` as usual. The call of `scale_loss` also marks these gradients as scaled.

        Args:
            loss: a function without arguments that returns a scalar tensor.
            var_list: the trainable variables to differentiate by. None: those that the optimizer was built on.

        Returns:
            A list of (gradient, variable) pairs in the order of `var_list`. If the loss does not depend on a variable,
            its gradient is None (zeros on JAX).

        Raises:
            TypeError: if `loss` is not a function.
            ValueError: if `var_list` is missing before `build`, or has variables that are not trainable; if the loss
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
                "`loss` must be a function without arguments that returns a scalar, because a tensor cannot be "
                f"differentiated afterwards. Received: loss={loss!r} (of type {type(loss).__name__}). "
                "Use for example `minimize(lambda: loss_fn(y, model(x, training=True)), model.trainable_variables)`."
            )
        variables = self._variables_to_differentiate(var_list)
        placement.check(variables, base_optimizers(self))

        def scaled() -> tuple[Tensor, None]:
            return self.inner.scale_loss(scalar_loss(loss())), None

        grads, _ = runtime.value_and_grad(scaled, variables, self.axis_name, save_before_assignment)
        grads = unscaled_gradients(grads, variables, self.loss_scale)
        self._computed = True
        return list(zip(grads, variables))

    def minimize(self, loss: Callable[[], Tensor], var_list: Sequence[Variable] | None = None) -> Any:
        """Computes gradients like `compute_gradients`, and applies them like `apply_gradients`.

        Args:
            loss: a function without arguments that returns a scalar tensor: the mean over this replica's examples.
            var_list: the trainable variables to update. None: those that the optimizer was built on.

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
                    "`var_list` is required before the optimizer is built. "
                    "Use for example `minimize(loss, model.trainable_variables)`."
                )
            return list(self._trainable_variables)
        variables = list(var_list)
        frozen = [path_of(v) for v in variables if not getattr(v, "trainable", True)]
        if frozen or not variables:
            raise ValueError(
                f"`var_list` must hold trainable variables. Received: {frozen or variables}"
                + (", not trainable. " if frozen else ". ")
                + "Use for example `model.trainable_variables`."
            )
        return variables


def scalar_loss(value: Any) -> Tensor:
    """Returns the value of a loss function as a tensor; raises ValueError unless it is a scalar."""
    value = keras.ops.convert_to_tensor(value)
    if keras.ops.ndim(value):
        raise ValueError(
            f"`loss` must return a scalar. Received: a tensor of shape {tuple(value.shape)}. "
            "Use for example `keras.ops.mean(...)`."
        )
    return value
