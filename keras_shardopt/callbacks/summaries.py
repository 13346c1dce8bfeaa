"""What happens inside updates, written for TensorBoard during `fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.classic.summaries.event_file import checked_log_dir
from keras_shardopt.classic.summaries.recorder import Recorder
from keras_shardopt.classic.summaries.tags import checked_summaries, dynamic_loss_scale, rates
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class TrainingSummaries(keras.callbacks.Callback):
    """Writes TensorBoard summaries of updates, and shows the learning rate and the loss scale next to the loss.

    What is written, of every `every`-th update, with the number of the update as the step:

    | name in `summaries` | tag | what |
    |---|---|---|
    | "learning_rate" | `learning_rate` | the rate of the update |
    | "loss_scale" | `Loss_Optimization/loss_scale` | the scale, where it is one that changes |
    | "global_gradient_norm" | `Loss_Optimization/global_gradient_norm` | of all gradients together: global, unscaled, not yet clipped |
    | the same, with `GradientClipping` | `Loss_Optimization/global_clipped_gradient_norm` | after clipping |
    | "gradient_norm" | `Loss_Optimization/gradient_norm/<variable>` | after clipping, before `LARC` |
    | "gradients" | `Loss_Optimization/gradients/<variable>` | the same, as a histogram; 0 for what is not finite |
    | "variable_norm" | `Loss_Optimization/variable_norm/<variable>` | before the update |
    | "variables" | `Loss_Optimization/variables/<variable>` | the same, as a histogram |
    | "gradient_noise_scale" | `Loss_Optimization/gradient_noise_scale`, `gradient_noise_scale_in_batches` | up to which number of rows, or how many batches of an update in one, larger batches pay |
    | "larc_summaries" | `Loss_Optimization/larc_grad_update/<variable>`, `larc_final_lr`, `larc_clip_on` | the factor of `LARC`, the rate times it, and (in clip mode) whether it is below 1 |

    and, unless `summaries` is empty, `train_loss`, the mean over the epoch so far, where the step keeps one.
    `<variable>` is its path. An update that was skipped for an overflow leaves no trace.

    The logs of each epoch get `learning_rate` and, with dynamic loss scaling, `loss_scale`, which Keras then prints and
    keeps in the history, as it does for its own callbacks.

    Of a model with a `train_step` of its own that holds several optimizers, all that update are watched, and tags and
    logs begin with the name of the attribute: `d_optimizer/learning_rate`. One that its first update builds is seen
    from the second step on. On JAX such a step takes along the state of `model.optimizer` only, so that of the others
    there are "learning_rate" and "loss_scale".

    "gradient_noise_scale" is the average over many updates that `GradientNoise` has, of replicas or, on one of them, of
    micro-batches; see [choosing a batch size](../summaries.md#choosing-a-batch-size). It costs something
    in each update: a norm of the replica's gradient and an all-reduce of three numbers, and on PyTorch the
    overlap of sending and computing. The number of rows is known in `fit` of a prepared model.

    The numbers come from inside the optimizer, so it must be one of this package (`CrossShard(Adam())` will do, on one
    replica too); of others the learning rate is written, if nothing else is asked for. While the callback watches, the
    optimizer has a few more variables, one scalar or vector for each kind of number; "gradients" and "variables"
    take as much memory as the weights, each, and "variables" and "variable_norm" cost JAX a copy of the weights in
    every step. They are part of no file. When training ends they go, and the model's training step is compiled anew
    next time.

    Args:
        log_dir: path or None. Where rank 0 writes event files; None writes none. Needs
            `pip install tensorboardX`, but not TensorFlow.
        summaries: a list of names from the table. None (default) is `["learning_rate", "global_gradient_norm",
            "loss_scale"]`, `[]` is none at all.
        every: int >= 1. In updates.

    Raises:
        TypeError: if `summaries` is not a list, or `every` not an int.
        ValueError: if a name is unknown or `every` less than 1; when training begins, if something is asked for that
            an optimizer does not show.
        ImportError: when training begins, if files are to be written and `tensorboardX` is not installed.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard(keras.optimizers.SGD(0.1)), "mse")
        >>> callback = ks.callbacks.TrainingSummaries(log_dir=None)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[callback], verbose=0)
        >>> round(history.history["learning_rate"][0], 3)
        0.1

    References:
        The argument `summaries` of OpenSeq2Seq's `optimize_loss`, with its tags.
    """

    def __init__(self, log_dir: Any = None, summaries: Sequence[str] | None = None, every: int = 100) -> None:
        checked_summaries(summaries)
        checked_log_dir(log_dir)
        super().__init__()
        self.log_dir = log_dir
        self.summaries = None if summaries is None else list(summaries)
        self.every = check.integer("every", every, fix="In updates.")
        self._optimizers: dict[str, Any] = {}
        self._recorders: dict[str, Recorder] = {}
        self._updates_before: dict[str, int] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to look."""
        model = self.model
        self._optimizers = _by_prefix(model)
        optimizer = self._optimizers.get("")
        if optimizer is not None and optimizer is model.optimizer and not optimizer.built:
            with placement.colocate_with(model.trainable_variables[0]):
                optimizer.build(model.trainable_variables)
        self._updates_before = {prefix: _num_updates(o) for prefix, o in self._optimizers.items()}
        self._recorders = {}
        self._look()
        self._count_from_updates()

    def _look(self) -> None:
        """Begins to look at those optimizers that have been built by now."""
        if self.log_dir is None and not self.summaries:
            return
        model = self.model
        for prefix, optimizer in self._optimizers.items():
            if optimizer.built and prefix not in self._recorders:
                self._recorders[prefix] = Recorder(
                    optimizer,
                    self.log_dir,
                    self.summaries,
                    self.every,
                    prefix=prefix,
                    colocate_with=next(iter(self._recorders.values()), None),
                    looks_inside=self._looks_inside(model, prefix, optimizer),
                )
                model.make_train_function(force=True)

    def _looks_inside(self, model: Any, prefix: str, optimizer: Optimizer) -> bool:
        """Whether the updates of an optimizer can be seen, and are to be."""
        if len(self._optimizers) == 1:
            return True
        if optimizer is model.optimizer:  # that of a bare `compile()`, as a rule, which is not used
            return isinstance(optimizer, OptimizerWrapper)
        if not runtime.updates_are_stateless:
            return True
        hidden = set(checked_summaries(self.summaries)) - {"learning_rate", "loss_scale"}
        if hidden and self.summaries is not None:
            raise ValueError(
                "On this Keras backend a training step takes along the state of `model.optimizer`, and what happens "
                f"inside the updates of others cannot be seen. Received: summaries={self.summaries!r}, with "
                f'`{prefix[:-1]}`. Use `summaries=["learning_rate", "loss_scale"]`.'
            )
        return False

    def _count_from_updates(self) -> None:
        recorders = list(self._recorders.values())
        if recorders:
            _ = self.model  # on JAX this takes the state out of the training step
            self._base = max(_num_updates(recorder.optimizer) * recorder.num_micro_batches for recorder in recorders)
            self._period = self.every * min(recorder.num_micro_batches for recorder in recorders)
            self._num_periods = self._base // self._period

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Batches are numbered anew."""
        self._count_from_updates()

    # At the beginning of a batch, not at the end of the one before it: Keras waits for each step's logs if anyone
    # asks for an end.
    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, if it is time."""
        if len(self._recorders) < len(self._optimizers):
            before = len(self._recorders)
            self._look()
            if len(self._recorders) > before:
                self._count_from_updates()
                self._base -= batch
        if not self._recorders:
            return
        done = self._base + batch
        if len(self._optimizers) == 1:
            (recorder,) = self._recorders.values()
            # Windows of micro-batches need not end where an epoch does, but one update is in each so many of them.
            recorder.expect(done % self._period >= self._period - recorder.num_micro_batches)
        else:  # of which each may make more updates than one in a step, or fewer
            for recorder in self._recorders.values():
                recorder.expect(None)
        if done // self._period > self._num_periods:
            self._num_periods = done // self._period
            self._record()

    def _record(self) -> None:
        model = self.model  # on JAX this takes the state out of the training step
        more: Callable[[], dict[str, float]] = functools.partial(_train_loss, model)
        for recorder in self._recorders.values():
            if recorder.record(more):
                more = dict  # once

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes what is left, and adds to `logs`, which is the dict that the callbacks after this one get."""
        _ = self.model  # on JAX this takes the state out of the training step
        self._record()
        if logs is None:
            return
        for prefix, optimizer in self._optimizers.items():
            if prefix and _num_updates(optimizer) == self._updates_before[prefix]:
                continue  # the step does not use it
            logs.update({f"{prefix}{tag}": rate for tag, rate in rates(optimizer).items()})
            if (scale := dynamic_loss_scale(optimizer)) is not None:
                logs[f"{prefix}loss_scale"] = scale

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Looks no longer."""
        for recorder in self._recorders.values():
            recorder.close()
        if self._recorders:
            self.model.train_function = None
        self._recorders, self._optimizers = {}, {}


def _by_prefix(model: Any) -> dict[str, Any]:
    """The optimizers that may update a model, by what their tags begin with: nothing where there is one only."""
    held = optimizers_in_step(model)
    if len(held) == 1:
        return {"": held[0]}
    names = {id(value): name for name, value in vars(model).items()}
    found: dict[str, Any] = {}
    for optimizer in held:
        name = names.get(id(optimizer), optimizer.name)
        name = name if f"{name}/" not in found else f"{name}_{len(found)}"
        found[f"{name}/"] = optimizer
    return found


def _num_updates(optimizer: Optimizer) -> int:
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def _train_loss(model: Any) -> dict[str, float]:
    """The mean of the losses of an epoch so far; nothing where the training step does not keep it."""
    tracker = next(iter(model.metrics), None)
    if tracker is None or not float(keras.ops.convert_to_numpy(getattr(tracker, "count", 1))):
        return {}
    return {"train_loss": float(keras.ops.convert_to_numpy(tracker.result()))}
