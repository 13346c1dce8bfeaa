"""Callbacks: for several replicas, for backups, and `TrainingSummaries`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt._typing import Groups, Variable
from keras_shardopt.backup import BackupAndRestore
from keras_shardopt.models import layers_of, optimizers_of
from keras_shardopt.optimizers.cross_shard import CrossShard, cross_shards
from keras_shardopt.replica import framework
from keras_shardopt.replica.trainer import has_built_in_step
from keras_shardopt.saving import ModelCheckpoint
from keras_shardopt.summaries import Recorder, checked_log_dir, checked_summaries, dynamic_loss_scale, rates
from keras_shardopt.wrapper import OptimizerWrapper, inside

__all__ = [
    "BackupAndRestore",
    "CheckReplicas",
    "ModelCheckpoint",
    "StopOnNonFinite",
    "SyncReplicas",
    "TrainingSummaries",
]


class SyncReplicas(keras.callbacks.Callback):
    r"""Starts all replicas equal, and averages the logs of each epoch over them.

    When training begins, all model variables (weights that are not trained and seed states too) and all optimizer
    variables take the values of rank 0. At the end of each epoch every number in the logs becomes
    $\frac{1}{N} \sum_p v_p$, with $N$ the number of processes and $v_p$ the number on process $p$. What comes after
    it in the list of callbacks then decides alike everywhere: `ReduceLROnPlateau`, `EarlyStopping` and
    `ModelCheckpoint` see the same `val_loss` on each rank. So does the history that `fit` returns.

    It must stand before them, or they would see the numbers of their own rank only.

    On PyTorch the processes are the ranks, and on JAX those of `jax.distributed`, whose metrics Keras has made global
    already. Where one process holds all replicas it does nothing.

    Raises:
        ValueError: when training begins, if a callback that watches a metric (one with an attribute `monitor`) stands
            before this one; on every process, if variables differ in shape or dtype between processes; and at the
            end of an epoch, on every process, if they did not log the same metrics.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> with ks.data_parallel() as replicas:
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(ks.CrossShard("sgd"), "mse")
        >>> callbacks = [ks.callbacks.SyncReplicas(), keras.callbacks.EarlyStopping("loss")]
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=callbacks, verbose=0)
        >>> list(history.history)
        ['loss']
        >>> replicas.close()

    References:
        `BroadcastGlobalVariablesCallback` and `MetricAverageCallback` of Horovod, of which this is both.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes all processes start with rank 0's variables."""
        for callback in _standing_before(self):
            if hasattr(callback, "monitor"):
                name = type(callback).__name__
                raise ValueError(
                    "`SyncReplicas` must stand before the callbacks that watch a metric, or these see the numbers of "
                    f"their own rank, and ranks decide differently. Received: `{name}` before it. "
                    f"Use `callbacks=[SyncReplicas(), ..., {name}(...)]`."
                )
        model = self.model
        if framework.processes_start_apart:
            for part in _reducers_in(model):
                part._check_peers()
                part._check_parts()
        framework.start_equal(model.variables, _optimizer_variables(model))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages `logs` in place, which is the dict that the callbacks after this one get."""
        if logs is None:
            return
        everyones = framework.gather_objects(dict(logs))
        for process, theirs in enumerate(everyones):
            if theirs.keys() != everyones[0].keys():
                raise ValueError(
                    f"All processes must log the same metrics. Received after epoch {epoch}: {sorted(everyones[0])} on "
                    f"process 0, {sorted(theirs)} on process {process}. Compile with the same metrics and "
                    "give `validation_data` on every process, or on none."
                )
        for name in logs:
            logs[name] = _mean([theirs[name] for theirs in everyones])


class CheckReplicas(keras.callbacks.Callback):
    """Compares the replicas' weights and optimizer state, bit by bit, and stops training when they differ.

    Replicas that have drifted apart train on without a sign: each reduces its gradients with those of the others and
    applies them to weights of its own. This callback computes a fingerprint of each variable on each replica, which a
    single flipped bit always changes (other differences but for one in 2**32), and compares these; one small exchange
    per check. It checks after every `every` training batches and when training ends. With one replica it does nothing.

    Compared are the trainable weights, the weights of frozen layers, and all optimizer variables. What layers keep for
    themselves while they train is not: the moving statistics of a `BatchNormalization` and the seeds of a `Dropout` are
    each replica's own on TensorFlow and PyTorch. What a `CrossShard(group_assignment=...)` updates is compared within
    its groups only, since groups differ on purpose.

    Args:
        every: int >= 1. After how many training batches to check.

    Raises:
        TypeError: if `every` is not an int.
        ValueError: if `every` is less than 1.
        RuntimeError: from training, on every process, when replicas differ. It names each variable that does and, where
            most replicas agree, those that do not agree with them.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> with ks.data_parallel() as replicas:
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(ks.CrossShard("sgd"), "mse")
        >>> check = ks.callbacks.CheckReplicas(every=100)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[check], verbose=0)
        >>> replicas.close()

        In a loop of your own, `check` compares at once:

        >>> check.set_model(model)
        >>> check.check()
    """

    def __init__(self, every: int = 100) -> None:
        every = check.integer("every", every, fix="Give it in training batches.")
        super().__init__()
        self.every = every
        self._restart()

    def _restart(self) -> None:
        self._last_batch = -1
        self._num_batches = 0
        self._num_unchecked = 0
        self._alone = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to count."""
        self._restart()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Batches are numbered anew."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks, if it is time."""
        # With `steps_per_execution` one call stands for several batches.
        self._num_batches += batch - self._last_batch
        self._num_unchecked += batch - self._last_batch
        self._last_batch = batch
        if self._num_unchecked >= self.every and not self._alone:
            self.check()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks what has been trained since the last time."""
        if self._num_unchecked and not self._alone:
            self.check()

    def check(self) -> None:
        """Compares the replicas now. All processes must call it together.

        Raises:
            RuntimeError: on every process, if replicas differ.
        """
        self._num_unchecked = 0
        # Not before it is time: on JAX this takes the state out of the training step.
        model = self.model
        variables = _compared(model)
        fingerprints = framework.fingerprints(variables)
        self._alone = len(fingerprints) == 1
        found = [
            f"`{variable.path}` on {where}"
            for variable, column, groups in zip(variables, fingerprints.T, _groups(model, variables, len(fingerprints)))
            for group in groups
            if (where := _odd_ones(column, group))
        ]
        if found:
            more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
            raise RuntimeError(
                "All replicas must have the same weights and optimizer state, bit for bit. "
                f"Received, after {self._num_batches} batches of this `fit`: another value of "
                f"{'; of '.join(found[:_MOST_NAMES])}{more}. "
                "Is every gradient reduced, does any replica change variables by itself, is the memory sound? "
                "Go on from the last checkpoint; `keras_shardopt.callbacks.SyncReplicas` starts all replicas equal."
            )


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends training right after the batch in which `CrossShard(..., on_nonfinite="raise")` met a NaN or infinity.

    A compiled step cannot raise by itself everywhere: on JAX, and on TensorFlow with `jit_compile=True`, the update is
    left out at once, but without this callback the error comes when `fit` ends on JAX, and not at all on TensorFlow.
    Elsewhere it changes nothing. It looks at one number after each batch, which waits for the batch to be done.

    Raises:
        FloatingPointError: after such a batch, on every process, with the names of the replica and the variable.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd", on_nonfinite="raise"), "mse")
        >>> stop = ks.callbacks.StopOnNonFinite()
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[stop], verbose=0)
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """What was left out before, and perhaps ended an earlier `fit`, is over."""
        for reducer in self._reducers():
            reducer.check_finite(from_now=True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises, if the batch has left out an update."""
        for reducer in self._reducers():
            reducer.check_finite()

    def _reducers(self) -> list[CrossShard]:
        return _reducers_in(self.model)


class TrainingSummaries(keras.callbacks.Callback):
    """Writes TensorBoard summaries of updates, and shows the learning rate and the loss scale beside the loss.

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
    | "larc_summaries" | `Loss_Optimization/larc_grad_update/<variable>`, `larc_final_lr`, `larc_clip_on` | the factor of `LARC`, the rate times it, and (in clip mode) whether it is below 1 |

    and, unless `summaries` is empty, `train_loss`, the mean over the epoch so far, where the step keeps one.
    `<variable>` is its path. An update that was skipped for an overflow leaves no trace.

    The logs of each epoch get `learning_rate` and, with dynamic loss scaling, `loss_scale`, which Keras then prints and
    keeps in the history, as it does for its own callbacks.

    Of a model with a `train_step` of its own that holds several optimizers, all that update are watched, and tags and
    logs begin with the name of the attribute: `d_optimizer/learning_rate`. One that its first update builds is seen
    from the second step on. On JAX such a step takes along the state of `model.optimizer` only, so that of the others
    there are "learning_rate" and "loss_scale".

    The numbers come from inside the optimizer, so it must be one of this package (`CrossShard(Adam())` will do, on one
    replica too); of others the learning rate is written, if nothing else is asked for. While the callback watches, the
    optimizer has a few more variables, one scalar or vector for each kind of number; "gradients" and "variables"
    take as much memory as the weights, each, and "variables" and "variable_norm" cost JAX a copy of the weights in
    every step. They are part of no file. When training ends they go, and the model's training step is compiled anew
    next time.

    Args:
        log_dir: path or None. Where the chief of all processes writes event files; None writes none. Needs
            `pip install "keras-shardopt[summaries]"`; TensorFlow is not needed.
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
            with framework.beside(model.trainable_variables[0]):
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
                    beside=next(iter(self._recorders.values()), None),
                    looks_inside=self._looks_inside(model, prefix, optimizer),
                )
                model.make_train_function(force=True)

    def _looks_inside(self, model: Any, prefix: str, optimizer: Any) -> bool:
        """Whether the updates of an optimizer can be seen, and are to be."""
        if len(self._optimizers) == 1:
            return True
        if optimizer is model.optimizer:  # that of a bare `compile()`, as a rule, which is not used
            return isinstance(optimizer, OptimizerWrapper)
        if not framework.updates_are_stateless:
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
            self._base = max(_num_updates(recorder.optimizer) * recorder.num_micro_steps for recorder in recorders)
            self._period = self.every * min(recorder.num_micro_steps for recorder in recorders)
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
            # Windows of micro-steps need not end where an epoch does, but one update is in each so many of them.
            recorder.expect(done % self._period >= self._period - recorder.num_micro_steps)
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
    held = [model.optimizer] if has_built_in_step(model) else optimizers_of(model)
    if len(held) == 1:
        return {"": held[0]}
    names = {id(value): name for name, value in vars(model).items()}
    found: dict[str, Any] = {}
    for optimizer in held:
        name = names.get(id(optimizer), optimizer.name)
        name = name if f"{name}/" not in found else f"{name}_{len(found)}"
        found[f"{name}/"] = optimizer
    return found


def _num_updates(optimizer: Any) -> int:
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def _train_loss(model: Any) -> dict[str, float]:
    """The mean of the losses of an epoch so far; nothing where the training step does not keep it."""
    tracker = next(iter(model.metrics), None)
    if tracker is None or not float(keras.ops.convert_to_numpy(getattr(tracker, "count", 1))):
        return {}
    return {"train_loss": float(keras.ops.convert_to_numpy(tracker.result()))}


_MOST_NAMES = 8


def _standing_before(callback: keras.callbacks.Callback) -> list[Any]:
    """The callbacks before it in the list whose call is running."""
    # Keras tells a callback nothing about the list that it is in.
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            places = [i for i, other in enumerate(caller.callbacks) if other is callback]
            return list(caller.callbacks[: places[0]]) if places else []
        frame = frame.f_back  # type: ignore[assignment]
    return []


def _reducers_in(model: Any) -> list[CrossShard]:
    return [part for optimizer in optimizers_of(model) for part in cross_shards(optimizer)]


def _optimizer_variables(model: Any) -> list[Variable]:
    return [v for o in optimizers_of(model) for v in getattr(o, "_shared_variables", o.variables)]


def _compared(model: Any) -> list[Variable]:
    """The variables that must be equal on all replicas, in the order of the model's."""
    frozen = {id(v) for layer in layers_of(model) if not layer.trainable for v in layer.weights}
    weights = [v for v in model.weights if v.trainable or id(v) in frozen]
    return weights + _optimizer_variables(model)


def _groups(model: Any, variables: Sequence[Variable], num_replicas: int) -> list[Groups]:
    """For each variable the groups in which it must be equal: those of the optimizer that updates it."""
    # As the number of the group that each replica is in, so that two assignments cut each other.
    number_of: dict[int, list[tuple[int, ...]]] = {}
    of_all: list[tuple[int, ...]] = [()] * num_replicas
    for part in [part for optimizer in optimizers_of(model) for part in (optimizer, *inside(optimizer))]:
        groups: Groups | None = getattr(part, "group_assignment", None) if num_replicas > 1 else None
        if groups is None and not isinstance(part, CrossShard):
            continue
        numbers = dict.fromkeys(range(num_replicas), 0)
        numbers.update({replica: i for i, group in enumerate(groups or []) for replica in group})
        of_all = [(*known, numbers[i]) for i, known in enumerate(of_all)]
        for variable in [*part._trainable_variables, *part.variables]:
            before = number_of.get(id(variable), [()] * num_replicas)
            number_of[id(variable)] = [(*known, numbers[i]) for i, known in enumerate(before)]
    found: list[Groups] = []
    for variable in variables:
        # One that no optimizer updates may differ where any of them lets weights differ.
        labels = number_of.get(id(variable), of_all)
        found.append([[i for i in range(num_replicas) if labels[i] == label] for label in dict.fromkeys(labels)])
    return found


def _odd_ones(fingerprints: np.ndarray, group: Sequence[int]) -> str:
    """Which replicas of the group differ from the others, in words; empty if none does."""
    agreeing: dict[int, list[int]] = {}
    for replica in group:
        agreeing.setdefault(int(fingerprints[replica]), []).append(replica)
    if len(agreeing) == 1:
        return ""
    largest = max(agreeing.values(), key=len)
    if 2 * len(largest) > len(group):
        odd = [replica for replica in group if replica not in largest]
        return f"{_replicas(odd)}, against {_replicas(largest)}"
    return " against ".join(_replicas(replicas) for replicas in agreeing.values())


def _replicas(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"replica {ids[0]}"
    return f"replicas {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def _mean(values: list[Any]) -> Any:
    if all(value == values[0] for value in values) or not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    return sum(values) / len(values)
