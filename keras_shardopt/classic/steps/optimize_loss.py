"""OpenSeq2Seq's one call: an optimizer, or a whole training step, from one set of arguments.

It composes what the rest of the package has, and holds no arithmetic of its own.
"""

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
from keras_shardopt.numerics import Optimizer, Tensor, Variable
from keras_shardopt.optimizers import AutomaticLossScaler
from keras_shardopt.optimizers.cross_shard import cross_shards
from keras_shardopt.optimizers.mixed_precision import updating_with
from keras_shardopt.optimizers.two_phases import scalar_loss
from keras_shardopt.wrapping.rollback import note_before_assignment

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
    """A training step: a function of a batch that runs `loss` forwards and backwards and updates the weights.

    ```python
    step = ks.optimize_loss(lambda x, y: loss_fn(y, model(x, training=True)), "Adam", model=model)
    for x, y in batches:
        value = step(x, y)
    ```

    The step is one compiled program (`tf.function`, `jax.jit`; on PyTorch it runs line by line). What the loss assigns,
    such as moving statistics and seeds, is assigned; variables that it only reads may change between steps.

    Several replicas (`on_horovod=True`, everything made inside `with data_parallel():`):

    | backend | the step is given | and returns |
    |---|---|---|
    | TensorFlow | the rows of all replicas of this process, and divides them | the mean over its replicas |
    | JAX | the same | the mean over all replicas |
    | PyTorch | the rows of this rank | this rank's loss |

    The loss is the mean over the rows that it is given, on every backend: of a `keras.losses.Loss` or any arithmetic.

    Args:
        loss: a function of the batch that returns a scalar. What depends on the weights must be computed in it.
        optimizer: see `build_optimizer`.
        optimizer_params: see `build_optimizer`.
        learning_rate_decay_fn: see `build_optimizer`.
        var_list: the variables to train; None for all trainable ones of `model`. All others stay as they are.
        dtype: see `build_optimizer`.
        clip_gradients: see `build_optimizer`.
        summaries: names of what shall be seen: "learning_rate", "gradients", "gradient_norm", "global_gradient_norm",
            "variables", "variable_norm", "larc_summaries", "loss_scale", "gradient_noise_scale" (not on several
            replicas of JAX). None stands for the learning rate, the global gradient norm and the loss scale if
            `log_dir` is given, and for nothing otherwise; so does `[]`.
        larc_params: see `build_optimizer`.
        loss_scaling: see `build_optimizer`.
        loss_scaling_params: see `build_optimizer`.
        on_horovod: bool. Whether to average over replicas: `build_optimizer(cross_shard=True)`.
        iter_size: int >= 1. Micro-batches per update; see `skip_update_ph`. On several replicas of JAX each
            micro-batch communicates all the same, and a warning says so; there `model.fit` after `prepare` does not.
        skip_update_ph: None: the step counts, and updates after every `iter_size`-th call. True: each call says so:
            `step(*batch, skip_update=True)` adds to the gradients, `skip_update=False` adds and updates. Either way
            each gradient counts 1 / `iter_size`.
        model: a built `keras.Model` or None. Its regularisers and `add_loss` are added to the loss.
        tf1_defaults: see `build_optimizer`.
        log_dir: path or None. Where rank 0 writes TensorBoard event files, of every `every`-th update.
        every: int >= 1. In updates.
        jit_compile: None (default) as above; True for XLA on TensorFlow and `torch.compile` on PyTorch; False to run
            line by line everywhere.

    Returns:
        A `TrainingStep`.

    Raises:
        TypeError: if `loss` is not a function, and as `build_optimizer`.
        ValueError: as `build_optimizer`; if there is nothing to train; if a summary is unknown; if there are several
            replicas and `on_horovod` is False, as each would train by itself.
        ImportError: if `log_dir` is given and `tensorboardX` is not installed.

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
        `optimize_loss` of OpenSeq2Seq's `optimizers.py`, which built a graph. There the training loop updated with the
        very first micro-batch alone, whose gradient counted 1 / `iter_size` then: not repeated. `iter_size` without
        Horovod was ignored, and variables without a gradient failed in most settings; both work.
    """
    if not callable(loss):
        raise TypeError(
            "`loss` must be a function of the batch that returns a scalar: a tensor does not show how it was made. "
            f"Received: loss={loss!r} (of type {type(loss).__name__}). "
            "Use for example `lambda x, y: loss_fn(y, model(x, training=True))`."
        )
    checked_summaries(summaries)
    if skip_update_ph is not None and skip_update_ph is not True:
        raise TypeError(
            "`skip_update_ph` must be None, or True where each call of the step says whether it updates. "
            f"Received: skip_update_ph={skip_update_ph!r}. Give the value to the step: `step(*batch, skip_update=...)`."
        )
    check.flag("on_horovod", on_horovod)
    if jit_compile is not None:
        check.flag("jit_compile", jit_compile)
    reduces = on_horovod or _reducer_of(optimizer) is not None
    num_replicas = processes.num_replicas()
    if num_replicas > 1 and not reduces:
        raise ValueError(
            "Several replicas must train together, and without a reduction each would train by itself. "
            f"Received: {num_replicas} replicas, with on_horovod={on_horovod!r}. "
            "Use `optimize_loss(..., on_horovod=True)`."
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
        # Also on a single replica, where it is nothing, but has slots and shows what happens inside.
        _reducer_of(optimizer) is None,
        tf1_defaults=tf1_defaults,
    )
    if skip_update_ph and getattr(_reducer_of(built), "accumulation", None) is None:
        raise ValueError(
            "`skip_update_ph` needs `iter_size` > 1, or there is nothing to accumulate. "
            f"Received: iter_size={iter_size!r}. Leave `skip_update_ph` out."
        )
    checked_log_dir(log_dir)
    every = check.integer("every", every, fix="In updates.")
    is_off = (log_dir is None and summaries is None) or (summaries is not None and not len(summaries))
    seen = None if is_off else (log_dir, summaries, every)
    variables = _trained(var_list, model)
    return TrainingStep(loss, built, variables, model, skip_update_ph is True, seen, jit_compile)


class TrainingStep:
    """What `optimize_loss` returns: call it with a batch to make a step. See there.

    Attributes:
        optimizer: the optimizer that `build_optimizer` has made of the arguments.
        variables: the variables that are trained.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: Optimizer,
        variables: Sequence[Variable],
        model: Any,
        each_call_says: bool,
        seen: tuple[Any, Sequence[str] | None, int] | None,
        jit_compile: bool | None,
    ) -> None:
        self.optimizer = optimizer
        self.variables = list(variables)
        self._loss = loss
        self._model = model
        self._each_call_says = each_call_says
        self._reducer = _reducer_of(optimizer)
        self._iter_size = 1 if self._reducer.accumulation is None else self._reducer.accumulation.num_steps
        self._reducer.state_finder.tell(getattr(for_backend(_STEPS), "GRADIENT_STATE", None))
        if not optimizer.built:
            with placement.colocate_with(self.variables[0]):
                optimizer.build(self.variables)
        self._recorder = None if seen is None else Recorder(optimizer, *seen)
        self._num_calls = 0
        self._num_updates = int(ops.convert_to_numpy(optimizer.iterations))
        known = [*self.variables, *([] if model is None else model.variables), *optimizer.variables]
        self._run = compile_step(self._micro_step, list({id(v): v for v in known}.values()), jit_compile)

    def __call__(self, *batch: Any, skip_update: bool | None = None) -> Tensor:
        """Runs one micro-batch.

        Args:
            *batch: what `loss` takes: arrays, tensors, or nested structures of them, with equally many rows.
            skip_update: bool or None; see `skip_update_ph` of `optimize_loss`.

        Returns:
            The loss, not scaled, before the update: a scalar tensor.

        Raises:
            ValueError: if `skip_update` is given and should not be, or the other way round.
        """
        updates = self._window(skip_update)
        is_due = updates and (self._num_updates + 1) % self._every == 0
        if self._recorder is not None:
            self._recorder.expect(is_due)
        value = self._run(*batch) if skip_update is None else self._run(*batch, skip_update=bool(skip_update))
        self._num_calls += 1
        self._num_updates += updates
        if self._recorder is not None and is_due:
            # Those that were skipped for an overflow do not count. To read it waits for the devices, as writing does.
            self._num_updates = int(ops.convert_to_numpy(self.optimizer.iterations))
            if self._num_updates % self._every == 0:
                self._recorder.record(lambda: {"train_loss": float(ops.convert_to_numpy(value))})
        return value

    @property
    def _every(self) -> int:
        return 1 if self._recorder is None else self._recorder.every

    def _window(self, skip_update: bool | None) -> bool:
        """Whether this call updates."""
        if (skip_update is not None) != self._each_call_says:
            needed = "must be given with each call" if self._each_call_says else "is counted by the step itself"
            raise ValueError(
                f"`skip_update` {needed}, as `skip_update_ph` was {True if self._each_call_says else None}. "
                f"Received: skip_update={skip_update!r}"
            )
        if skip_update is not None:
            return not skip_update
        return (self._num_calls + 1) % self._iter_size == 0

    def _micro_step(self, *batch: Any, skip_update: bool | None = None) -> Tensor:
        """What each replica does with its part of the batch."""

        def scaled() -> tuple[Tensor, Tensor]:
            with updating_with(self.optimizer):  # the model may be compiled with another one
                value = loss_of_batch()
            return self.optimizer.scale_loss(value), value

        def loss_of_batch() -> Tensor:
            value = scalar_loss(self._loss(*batch))
            if self._model is not None and self._model.losses:
                value = ops.add(value, ops.cast(get_regularization_loss(self._model), value.dtype))
            return value

        grads, value = runtime.value_and_grad(scaled, self.variables, self._reducer.axis_name, note_before_assignment)
        if skip_update is not None:
            # Not before the loss: replicas that are threads may take turns in it, and this is for the next `apply`.
            self._reducer.accumulation.decide(not skip_update)
        self.optimizer.apply(grads, self.variables)
        return value

    def summaries(self) -> dict[str, Any]:
        """What was seen in the update that was last looked at, by tag: floats, and arrays for histograms.

        Empty before the first one, and where nothing was asked for. `callbacks.TrainingSummaries` lists the tags.
        """
        return {} if self._recorder is None else self._recorder.values()[1]

    def close(self) -> None:
        """Ends the event file. The step must not be called again."""
        if self._recorder is not None:
            self._recorder.close()


_STEPS = {name: f"keras_shardopt.classic.steps.{name}" for name in ("tensorflow", "jax", "torch")}


def compile_step(
    function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
) -> Callable[..., Tensor]:
    """A training step as a program: on all replicas, with whatever variables it reads and assigns.

    Args:
        function: what each replica does with its part of the batch, given as positional arguments; keyword
            arguments are constants of the program. It returns a scalar, the mean over the rows of its part.
        variables: those that it reads and assigns, as far as known.
        jit_compile: None for the way that is usual on this backend, True for the compiler that fuses most, False
            for none.

    Returns:
        A function of the batch (arrays or tensors whose first dimension is that of the rows) and of the constants,
        that returns the mean over the replicas which this process runs.
    """
    steps = for_backend(_STEPS)
    if steps is None:
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")
    compiled: Callable[..., Tensor] = steps.compile_step(function, variables, jit_compile)
    return compiled


def get_regularization_loss(model: Any) -> Tensor:
    """The sum of what a model adds to its loss: penalties of regularisers, on weights and activities, and `add_loss`.

    Args:
        model: a `keras.Model` or layer. What depends on a batch is that of the latest call, so in a training step call
            this after the model.

    Returns:
        A scalar tensor in float32, to which each is cast first; 0.0 if there are none.

    Raises:
        TypeError: if `model` is neither.

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


def _reducer_of(optimizer: Optimizer) -> Any:
    """The outermost `CrossShard` of an optimizer; None where there is none."""
    found = cross_shards(optimizer) if isinstance(optimizer, keras.optimizers.Optimizer) else []
    return found[0] if found else None


def _trained(var_list: Sequence[Variable] | None, model: Any) -> list[Variable]:
    if var_list is None and model is None:
        raise ValueError(
            "`var_list` or `model` must be given, or nobody knows what to train. Received: None for both. "
            "Use for example `optimize_loss(..., model=model)`."
        )
    if model is not None and not getattr(model, "built", False):
        raise ValueError(
            "`model` must be a built `keras.Model`, so that its weights are there. "
            f"Received: model={model!r}. Give it a `keras.Input`, or call it once on a batch before."
        )
    variables = check.sequence("var_list", model.trainable_variables if var_list is None else var_list, at_least=0)
    if not all(hasattr(variable, "assign") for variable in variables):
        raise TypeError(f"`var_list` must be a list of variables. Received: var_list={var_list!r}")
    frozen = [getattr(v, "path", str(v)) for v in variables if not getattr(v, "trainable", True)]
    if frozen or not variables:
        raise ValueError(
            f"`{'model' if var_list is None else 'var_list'}` must have variables to train. "
            f"Received: {frozen or variables}{', which are not trainable' if frozen else ''}."
        )
    return variables
