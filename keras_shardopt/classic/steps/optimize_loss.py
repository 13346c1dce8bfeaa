"""`optimize_loss`: builds a training step from the arguments of OpenSeq2Seq's function of this name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.classic.build import build_optimizer
from keras_shardopt.classic.summaries.event_file import checked_log_dir
from keras_shardopt.classic.summaries.recorder import Recorder
from keras_shardopt.classic.summaries.tags import checked_summaries
from keras_shardopt.numerics import Optimizer, Tensor, Variable, path_of
from keras_shardopt.optimizers import AutomaticLossScaler
from keras_shardopt.optimizers.cross_shard import cross_shards_in
from keras_shardopt.optimizers.mixed_precision import updating_with
from keras_shardopt.optimizers.two_phases import scalar_loss
from keras_shardopt.wrapping.rollback import save_before_assignment

__all__ = ["TrainingStep", "build_optimizer", "get_regularization_loss", "optimize_loss"]


def optimize_loss(
    loss: Callable[..., Tensor],
    optimizer: Any,
    optimizer_params: Mapping[str, Any] | None = None,
    learning_rate_decay_fn: Any = None,
    var_list: Sequence[Variable] | None = None,
    dtype: Any = "float32",
    clip_gradients: float | None = None,
    summaries: Sequence[str] | None = None,
    larc_params: Mapping[str, Any] | None = None,
    loss_scaling: float | str | AutomaticLossScaler = 1.0,
    loss_scaling_params: Mapping[str, Any] | None = None,
    on_horovod: bool = False,
    iter_size: int = 1,
    skip_update_ph: Literal[True] | None = None,
    model: Any = None,
    *,
    tf1_defaults: bool = False,
    log_dir: Any = None,
    every: int = 100,
    jit_compile: bool | None = None,
) -> TrainingStep:
    """Build a training step: a function of a batch that computes `loss` and its gradients, and updates the weights.

    ```python
    step = ks.optimize_loss(lambda x, y: loss_fn(y, model(x, training=True)), "Adam", model=model)
    for x, y in batches:
        value = step(x, y)
    ```

    The step is one compiled program (`tf.function`, `jax.jit`), or eager on PyTorch. `loss` can use any variables: the
    step reads their current values, and assigns moving statistics and seeds.

    With several replicas (`on_horovod=True`, optimizer and model built inside `with data_parallel():`):

    | backend | batch | result |
    |---|---|---|
    | TensorFlow | rows of all replicas of this process, which the step splits | mean over these replicas |
    | JAX | rows of all replicas of this process, which the step splits | mean over all replicas |
    | PyTorch | rows of this rank | loss of this rank |

    The loss must be the mean over the rows that it receives, with or without `keras.losses`, on every backend.

    Args:
        loss: function of the batch that returns a scalar. It must compute everything that depends on the weights.
        optimizer: as in `build_optimizer`.
        optimizer_params: as in `build_optimizer`.
        learning_rate_decay_fn: as in `build_optimizer`.
        var_list: list of variables to train, or None for the trainable variables of `model`.
        dtype: as in `build_optimizer`.
        clip_gradients: as in `build_optimizer`.
        summaries: list of names: "learning_rate", "gradients", "gradient_norm", "global_gradient_norm",
            "variables", "variable_norm", "larc_summaries", "loss_scale", "gradient_noise_scale" (not with several
            replicas on JAX). None: learning rate, global gradient norm and loss scale with `log_dir`,
            otherwise none. `[]`: none.
        larc_params: as in `build_optimizer`.
        loss_scaling: as in `build_optimizer`.
        loss_scaling_params: as in `build_optimizer`.
        on_horovod: bool. Whether to average over replicas: `build_optimizer(cross_shard=True)`.
        iter_size: int >= 1. Micro-batches per update. The update uses the mean of their gradients. With several
            replicas on JAX, each micro-batch communicates, and a warning appears. `prepare(model)` and `fit` avoid it.
        skip_update_ph: True or None (default). None: every `iter_size`-th call updates. True: the caller decides.
            `step(*batch, skip_update=True)` accumulates; `skip_update=False` accumulates and updates.
        model: a built `keras.Model` or None. Its regularization losses and those of `add_loss` are added to the loss.
        tf1_defaults: as in `build_optimizer`.
        log_dir: path or None. Directory for TensorBoard event files, written by rank 0.
        every: int >= 1. Updates between summaries. Default 100.
        jit_compile: bool or None (default, as above). True: XLA on TensorFlow, `torch.compile` on PyTorch. False:
            eager on all backends.

    Returns:
        A `TrainingStep`.

    Raises:
        TypeError: if `loss` is not a function, or as in `build_optimizer`.
        ValueError: if no variable is trainable, a summary is unknown, or several replicas exist and `on_horovod` is
            False, or as in `build_optimizer`.
        ImportError: with `log_dir`, if `tensorboardX` is not installed.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> def loss(x, y):
        ...     return keras.ops.mean(keras.ops.square(model(x) - y))
        >>> step = ks.optimize_loss(loss, "SGD", {}, 0.1, clip_gradients=1.0, model=model)
        >>> x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
        >>> float(step(x, y)) > float(step(x, y))
        True

    References:
        `optimize_loss` of OpenSeq2Seq's `optimizers.py`. It made its first update after one micro-batch, ignored
        `iter_size` without Horovod, and usually failed for variables without a gradient.
    """
    if not callable(loss):
        raise TypeError(
            "`loss` must be a function of the batch that returns a scalar, because gradients are computed from the "
            f"function. Received: loss={loss!r} (of type {type(loss).__name__}). "
            "Use for example `lambda x, y: loss_fn(y, model(x, training=True))`."
        )
    checked_summaries(summaries)
    if skip_update_ph is not None and skip_update_ph is not True:
        raise TypeError(
            "`skip_update_ph` must be None, or True if the caller decides which calls update. "
            f"Received: skip_update_ph={skip_update_ph!r}. Use `skip_update_ph=True`, and pass the value to each call: "
            "`step(*batch, skip_update=...)`."
        )
    check.flag("on_horovod", on_horovod)
    if jit_compile is not None:
        check.flag("jit_compile", jit_compile)
    reduces = on_horovod or _cross_shard_of(optimizer) is not None
    num_replicas = processes.num_replicas()
    if num_replicas > 1 and not reduces:
        raise ValueError(
            "With several replicas, gradients must be combined. Otherwise each replica trains its own model. Received: "
            f"{num_replicas} replicas, with on_horovod={on_horovod!r}. Use `optimize_loss(..., on_horovod=True)`."
        )
    built = build_optimizer(
        optimizer,
        optimizer_params,
        learning_rate_decay_fn,
        dtype,
        clip_gradients,
        larc_params,
        loss_scaling,
        loss_scaling_params,
        iter_size,
        # Add a `CrossShard` for a single replica too: it then only provides summaries and methods such as `get_slot`.
        _cross_shard_of(optimizer) is None,
        tf1_defaults=tf1_defaults,
    )
    if skip_update_ph and getattr(_cross_shard_of(built), "accumulation", None) is None:
        raise ValueError(
            "`skip_update_ph` requires `iter_size` > 1, because `iter_size=1` does not accumulate. "
            f"Received: iter_size={iter_size!r}. Remove `skip_update_ph`."
        )
    checked_log_dir(log_dir)
    every = check.integer("every", every, fix="Pass a number of updates.")
    is_off = (log_dir is None and summaries is None) or (summaries is not None and not len(summaries))
    recorder_arguments = None if is_off else (log_dir, summaries, every)
    variables = _trained(var_list, model)
    return TrainingStep(loss, built, variables, model, skip_update_ph is True, recorder_arguments, jit_compile)


class TrainingStep:
    """A training step, created by `optimize_loss`. Call it with a batch.

    Attributes:
        optimizer: the optimizer from `build_optimizer`.
        variables: list of the variables to train.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: Optimizer,
        variables: Sequence[Variable],
        model: Any,
        caller_decides: bool,
        recorder_arguments: tuple[Any, Sequence[str] | None, int] | None,
        jit_compile: bool | None,
    ) -> None:
        self.optimizer = optimizer
        self.variables = list(variables)
        self._loss = loss
        self._model = model
        self._caller_decides = caller_decides
        self._cross_shard = _cross_shard_of(optimizer)
        accumulation = self._cross_shard.accumulation
        self._iter_size = 1 if accumulation is None else accumulation.window.num_steps
        self._cross_shard.state_finder.declare(getattr(for_backend(_STEPS), "GRADIENT_STATE", None))
        if not optimizer.built:
            with placement.colocate_with(self.variables[0]):
                optimizer.build(self.variables)
        self._recorder = None if recorder_arguments is None else Recorder(optimizer, *recorder_arguments)
        self._num_calls = 0
        self._num_updates = int(ops.convert_to_numpy(optimizer.iterations))
        known = [*self.variables, *([] if model is None else model.variables), *optimizer.variables]
        self._run = compile_step(self._micro_step, list({id(v): v for v in known}.values()), jit_compile)

    def __call__(self, *batch: Any, skip_update: bool | None = None) -> Tensor:
        """Compute the gradients of one micro-batch, and update if this call completes an update.

        Args:
            *batch: arguments of `loss`: arrays, tensors, or nested structures of these, with the same number of rows.
            skip_update: bool or None; see `skip_update_ph` of `optimize_loss`.

        Returns:
            The unscaled loss before the update: a scalar tensor.

        Raises:
            ValueError: if `skip_update` is passed without `skip_update_ph=True`, or missing with it.
        """
        updates = self._window(skip_update)
        is_due = updates and (self._num_updates + 1) % self._every == 0
        if self._recorder is not None:
            self._recorder.expect(is_due)
        value = self._run(*batch) if skip_update is None else self._run(*batch, skip_update=bool(skip_update))
        self._num_calls += 1
        self._num_updates += updates
        if self._recorder is not None and is_due:
            # The optimizer's count omits skipped updates. Read it only here, because reading waits for the devices.
            self._num_updates = int(ops.convert_to_numpy(self.optimizer.iterations))
            if self._num_updates % self._every == 0:
                self._recorder.record(lambda: {"train_loss": float(ops.convert_to_numpy(value))})
        return value

    @property
    def _every(self) -> int:
        return 1 if self._recorder is None else self._recorder.every

    def _window(self, skip_update: bool | None) -> bool:
        """Return True if this call makes an update, and False if it only accumulates gradients."""
        if (skip_update is not None) != self._caller_decides:
            needed = "must be passed to each call" if self._caller_decides else "must not be passed"
            raise ValueError(
                f"`skip_update` {needed}, because `skip_update_ph` was {True if self._caller_decides else None}. "
                f"Received: skip_update={skip_update!r}"
            )
        if skip_update is not None:
            return not skip_update
        return (self._num_calls + 1) % self._iter_size == 0

    def _micro_step(self, *batch: Any, skip_update: bool | None = None) -> Tensor:
        def scaled() -> tuple[Tensor, Tensor]:
            with updating_with(self.optimizer):  # instead of an optimizer that `model.compile` may have set
                value = loss_of_batch()
            return self.optimizer.scale_loss(value), value

        def loss_of_batch() -> Tensor:
            value = scalar_loss(self._loss(*batch))
            if self._model is not None and self._model.losses:
                value = ops.add(value, ops.cast(get_regularization_loss(self._model), value.dtype))
            return value

        grads, value = runtime.value_and_grad(
            scaled, self.variables, self._cross_shard.axis_name, save_before_assignment
        )
        if skip_update is not None:
            # Decide right before `apply`, because other replicas' threads decide while this thread computes its loss.
            self._cross_shard.accumulation.window.decide(not skip_update)
        self.optimizer.apply(grads, self.variables)
        return value

    def summaries(self) -> dict[str, Any]:
        """Return the latest summaries by tag: floats, and arrays for histograms. See `callbacks.TrainingSummaries`."""
        return {} if self._recorder is None else self._recorder.values()[1]

    def close(self) -> None:
        """Close the event file. The step must not be called again."""
        if self._recorder is not None:
            self._recorder.close()


_STEPS = {name: f"keras_shardopt.classic.steps.{name}" for name in ("tensorflow", "jax", "torch")}


def compile_step(
    function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
) -> Callable[..., Tensor]:
    """Compile a training step for all replicas. The step may read and assign any variables.

    Args:
        function: the step of one replica. Its positional arguments are the rows of the replica, its keyword arguments
            are constants of the program. It returns a scalar, the mean over these rows.
        variables: variables that `function` reads or assigns. The list may be incomplete.
        jit_compile: see `optimize_loss`.

    Returns:
        A function of the batch (arrays or tensors, with rows along dim 0) and the constants. It returns the mean over
        the replicas of this process.
    """
    steps = for_backend(_STEPS)
    if steps is None:
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")
    compiled: Callable[..., Tensor] = steps.compile_step(function, variables, jit_compile)
    return compiled


def get_regularization_loss(model: Any) -> Tensor:
    """Return the sum of a model's additional losses: weight and activity regularization, and `add_loss`.

    Args:
        model: a `keras.Model` or layer. Losses that depend on a batch have their value of the latest call.

    Returns:
        A float32 scalar tensor. Each loss is cast to float32 before the sum.

    Raises:
        TypeError: if `model` is not a model or layer.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> l2 = keras.regularizers.L2(0.5)
        >>> layer = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=l2)
        >>> layer.build((None, 4))
        >>> float(keras.ops.convert_to_numpy(ks.get_regularization_loss(layer)))
        2.0

    References:
        `get_regularization_loss` of OpenSeq2Seq's `optimizers.py`.
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(f"`model` must be a `keras.Model` or a layer. Received: model={model!r}")
    losses = [ops.cast(value, "float32") for value in model.losses]
    return ops.sum(ops.stack(losses)) if losses else ops.zeros((), "float32")


def _cross_shard_of(optimizer: Optimizer) -> Any:
    """Return the outermost `CrossShard` (a wrapper that averages gradients) of an optimizer, or None."""
    found = cross_shards_in(optimizer) if isinstance(optimizer, keras.optimizers.Optimizer) else []
    return found[0] if found else None


def _trained(var_list: Sequence[Variable] | None, model: Any) -> list[Variable]:
    if var_list is None and model is None:
        raise ValueError(
            "`var_list` or `model` must be passed. Received: None for both. "
            "Use for example `optimize_loss(..., model=model)`."
        )
    if model is not None and not getattr(model, "built", False):
        raise ValueError(
            f"`model` must be a built `keras.Model`. Received: model={model!r}. Start the model with a `keras.Input`, "
            "or call the model once on a batch."
        )
    variables = check.sequence("var_list", model.trainable_variables if var_list is None else var_list, at_least=0)
    if not all(hasattr(variable, "assign") for variable in variables):
        raise TypeError(f"`var_list` must be a list of variables. Received: var_list={var_list!r}")
    frozen = [path_of(v) for v in variables if not getattr(v, "trainable", True)]
    if frozen or not variables:
        raise ValueError(
            f"`{'model' if var_list is None else 'var_list'}` must contain trainable variables. Received: "
            f"{frozen or variables}{', which are not trainable' if frozen else ''}."
        )
    return variables
