"""A callback that writes TensorBoard summaries of optimizer updates during `fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.classic.summaries.event_file import checked_log_dir
from keras_shardopt.classic.summaries.recorder import Recorder
from keras_shardopt.classic.summaries.tags import checked_summaries, dynamic_loss_scale, rates
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import chain_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class TrainingSummaries(keras.callbacks.Callback):
    """Writes TensorBoard summaries of updates, and logs the learning rate and the loss scale next to the loss.

    It writes these values for every `every`-th update. The step in TensorBoard is the number of the update.

    | name in `summaries` | tag | value |
    |---|---|---|
    | "learning_rate" | `learning_rate` | the rate of the update |
    | "loss_scale" | `Loss_Optimization/loss_scale` | the scale, if it is dynamic |
    | "global_gradient_norm" | `Loss_Optimization/global_gradient_norm` | the norm of all global, unscaled gradients before clipping |
    | the same, with `GradientClipping` | `Loss_Optimization/global_clipped_gradient_norm` | that norm after clipping |
    | "gradient_norm" | `Loss_Optimization/gradient_norm/<variable>` | the norm after clipping, before `LARC` |
    | "gradients" | `Loss_Optimization/gradients/<variable>` | a histogram of the same gradients; 0 for non-finite values |
    | "variable_norm" | `Loss_Optimization/variable_norm/<variable>` | the norm before the update |
    | "variables" | `Loss_Optimization/variables/<variable>` | a histogram of the values before the update |
    | "gradient_noise_scale" | `Loss_Optimization/gradient_noise_scale`, `gradient_noise_scale_in_batches` | the largest useful batch size, in rows and in multiples of the present batch |
    | "larc_summaries" | `Loss_Optimization/larc_grad_update/<variable>`, `larc_final_lr`, `larc_clip_on` | the factor of `LARC`, the rate times the factor, and (in clip mode) whether the factor is below 1 |

    `<variable>` is the path of the variable. Unless `summaries` is empty, the callback also writes `train_loss`, the
    mean loss of the epoch so far, if the step tracks it. For an update skipped because of an overflow, it writes nothing.

    The logs of each epoch get `learning_rate` and, with dynamic loss scaling, `loss_scale`. Keras prints them and keeps
    them in the history.

    If a custom `train_step` uses several optimizers, tags and logs of each begin with its attribute name, such as
    `d_optimizer/learning_rate`. An optimizer that is built in its first update is recorded from the second step on. On
    JAX, Keras passes only the state of `model.optimizer` through the step, so for other optimizers only "learning_rate"
    and "loss_scale" are available.

    "gradient_noise_scale" is the running average of `GradientNoise`, over replicas or, with one replica, over
    micro-batches; see [choosing a batch size](../summaries.md#choosing-a-batch-size). Each update then also computes a
    norm of the replica's gradient and an all-reduce of three numbers. On PyTorch, communication no longer overlaps
    with computation. The value in rows is available only in `fit` of a prepared model (see `prepare`).

    Most values come from inside the optimizer, so it must be an optimizer of this package; `CrossShard(Adam())` works
    with one replica too. With other optimizers, only the learning rate is available. During training, the optimizer
    has an additional scalar or vector variable per kind of value, never saved in files. "gradients" and "variables"
    each take as much memory as the weights. On JAX, "variables" and "variable_norm" also cost a copy of the weights per
    step. After training, these variables are removed from the optimizer. The callback keeps them and the compiled
    training step: pass the same callback to the next `fit`, and nothing is compiled again, except with
    "gradient_noise_scale".

    Args:
        log_dir: path or None. The folder for the event files, written by rank 0; None writes no files. Needs
            `pip install tensorboardX`, but not TensorFlow.
        summaries: a list of names from the table. None (default) means `["learning_rate", "global_gradient_norm",
            "loss_scale"]`, `[]` means none.
        every: int >= 1 (default 100). Summaries are written for every `every`-th update.

    Raises:
        TypeError: if `summaries` is not a list, or `every` not an int.
        ValueError: if a name is unknown or `every` is less than 1; when training begins, if an optimizer cannot
            provide a requested value.
        ImportError: when training begins, if `log_dir` is set and `tensorboardX` is not installed.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard(keras.optimizers.SGD(0.1)), "mse")
        >>> callback = ks.callbacks.TrainingSummaries(log_dir=None)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[callback], verbose=0)
        >>> round(history.history["learning_rate"][0], 3)
        0.1

    References:
        The argument `summaries` of OpenSeq2Seq's `optimize_loss`, and its tags.
    """

    def __init__(self, log_dir: Any = None, summaries: Sequence[str] | None = None, every: int = 100) -> None:
        checked_summaries(summaries)
        checked_log_dir(log_dir)
        super().__init__()
        self.log_dir = log_dir
        self.summaries = None if summaries is None else list(summaries)
        self.every = check.integer("every", every, fix="Pass a number of updates.")
        self._optimizers: dict[str, Any] = {}
        self._recorders: dict[str, Recorder] = {}
        self._updates_before: dict[str, int] = {}
        # The model's step without and with recording.
        self._plain_step: Any = None
        self._recording_step: Any = None
        self._kept: _Kept | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Builds `model.optimizer` unless it is built, and starts to record the built optimizers."""
        model = self.model
        self._optimizers = _by_prefix(model)
        optimizer = self._optimizers.get("")
        if optimizer is not None and optimizer is model.optimizer and not optimizer.built:
            with placement.colocate_with(model.trainable_variables[0]):
                optimizer.build(model.trainable_variables)
        self._updates_before = {prefix: _num_updates(o) for prefix, o in self._optimizers.items()}
        self._recorders = {}
        self._plain_step = None if any(map(_is_observed, self._optimizers.values())) else model.train_function
        if not self._restart_recorders():
            self._kept = None
            self._start_recorders()
        self._count_from_updates()

    def _restart_recorders(self) -> bool:
        """Record again with the variables and the compiled step of the last training, if nothing has changed since."""
        kept = self._kept
        if kept is None or self._plain_step is None:
            return False
        optimizers = {prefix: recorder.optimizer for prefix, recorder in kept.recorders.items()}
        if kept.plain_step is not self._plain_step or kept.settings != self._settings():
            return False
        if optimizers != self._optimizers:
            return False
        for prefix, recorder in kept.recorders.items():
            recorder.reopen(next(iter(self._recorders.values()), None))
            self._recorders[prefix] = recorder
        self.model.train_function = self._recording_step = kept.recording_step
        return True

    def _settings(self) -> tuple[Any, ...]:
        return self.log_dir, self.summaries and tuple(self.summaries), self.every

    def _start_recorders(self) -> None:
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
                    looks_inside=self._records_updates(model, prefix, optimizer),
                )
                model.make_train_function(force=True)
                self._recording_step = model.train_function

    def _records_updates(self, model: Any, prefix: str, optimizer: Optimizer) -> bool:
        """Whether to record values from inside the updates of an optimizer. `prefix` is the start of its tags."""
        if len(self._optimizers) == 1:
            return True
        if optimizer is model.optimizer:  # record only a wrapper: others may be the unused default of `compile()`
            return isinstance(optimizer, OptimizerWrapper)
        if not runtime.updates_are_stateless:
            return True
        hidden = set(checked_summaries(self.summaries)) - {"learning_rate", "loss_scale"}
        if hidden and self.summaries is not None:
            raise ValueError(
                "On JAX, only `model.optimizer` can have summaries other than the learning rate and the loss scale. "
                f"Received: summaries={self.summaries!r}, and the optimizer `{prefix[:-1]}` in addition. "
                'Use `summaries=["learning_rate", "loss_scale"]`.'
            )
        return False

    def _count_from_updates(self) -> None:
        recorders = list(self._recorders.values())
        if recorders:
            _ = self.model  # on JAX, reading `model` copies the training state into the variables
            self._base = max(_num_updates(recorder.optimizer) * recorder.num_micro_batches for recorder in recorders)
            self._period = self.every * min(recorder.num_micro_batches for recorder in recorders)
            self._num_periods = self._base // self._period

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Computes the number of past batches from the number of updates, because batch numbers restart at 0."""
        self._count_from_updates()

    # Use this method, because Keras waits for the logs of each step if a callback has `on_train_batch_end`.
    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the summaries of the last `every` updates, if the batch before this one has completed them."""
        if len(self._recorders) < len(self._optimizers):
            before = len(self._recorders)
            self._start_recorders()
            if len(self._recorders) > before:
                self._count_from_updates()
                self._base -= batch
        if not self._recorders:
            return
        done = self._base + batch
        if len(self._optimizers) == 1:
            (recorder,) = self._recorders.values()
            # An update may use micro-batches of two epochs, so the batch that ends it is unknown. But any
            # `num_micro_batches` successive batches end one update, so measure in the last ones of the period.
            recorder.expect(done % self._period >= self._period - recorder.num_micro_batches)
        else:  # each optimizer may make several updates in a step, or none, so do not predict them
            for recorder in self._recorders.values():
                recorder.expect(None)
        if done // self._period > self._num_periods:
            self._num_periods = done // self._period
            self._record()

    def _record(self) -> None:
        model = self.model
        more: Callable[[], dict[str, float]] = functools.partial(_train_loss, model)
        for recorder in self._recorders.values():
            if recorder.record(more):
                more = dict  # only one recorder writes the loss

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the remaining summaries, and adds the rates and loss scales to `logs` for later callbacks."""
        _ = self.model  # on JAX, reading `model` copies the training state into the variables
        self._record()
        if logs is None:
            return
        for prefix, optimizer in self._optimizers.items():
            if prefix and _num_updates(optimizer) == self._updates_before[prefix]:
                continue  # the step does not use this optimizer
            logs.update({f"{prefix}{tag}": rate for tag, rate in rates(optimizer).items()})
            if (scale := dynamic_loss_scale(optimizer)) is not None:
                logs[f"{prefix}loss_scale"] = scale

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops recording, and gives the model its training step without recording again."""
        recorders, model = self._recorders, self.model
        for recorder in recorders.values():
            recorder.close()
        if recorders:
            can_restart = model.train_function is self._recording_step and self._plain_step is not None
            if can_restart and all(recorder.can_reopen for recorder in recorders.values()):
                self._kept = _Kept(self._plain_step, self._recording_step, self._settings(), recorders)
            model.train_function = self._plain_step if can_restart else None
        self._recorders, self._optimizers = {}, {}


class _Kept(NamedTuple):
    """The last training's steps without and with recording, its settings and its recorders."""

    plain_step: Any
    recording_step: Any
    settings: tuple[Any, ...]
    recorders: dict[str, Recorder]


def _by_prefix(model: Any) -> dict[str, Any]:
    """Returns the optimizers of the training step, keyed by the prefix of their tags ("" for a single optimizer)."""
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


def _is_observed(optimizer: Optimizer) -> bool:
    """Whether another callback records this optimizer, or a training that failed before `on_train_end`."""
    chain = chain_of(optimizer)
    return any(o._observer is not None for o in chain if isinstance(o, OptimizerWrapper))


def _num_updates(optimizer: Optimizer) -> int:
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def _train_loss(model: Any) -> dict[str, float]:
    """Returns the mean loss of the epoch so far; empty if the training step does not track it."""
    tracker = next(iter(model.metrics), None)
    if tracker is None or not float(keras.ops.convert_to_numpy(getattr(tracker, "count", 1))):
        return {}
    return {"train_loss": float(keras.ops.convert_to_numpy(tracker.result()))}
