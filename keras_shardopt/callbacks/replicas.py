"""Callbacks for several replicas: an equal start, logs of all of them, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.keras_callers import running_instance
from keras_shardopt.backends.models import equal_buffers, is_prepared, layers_of, optimizers_of
from keras_shardopt.callbacks.nonfinite import reducers_in
from keras_shardopt.numerics import Groups, Variable
from keras_shardopt.optimizers.cross_shard import CrossShard
from keras_shardopt.wrapping.chain import descendants, shared_variables


class SyncReplicas(keras.callbacks.Callback):
    r"""Starts all replicas equal, and averages the logs of each epoch over them, for a model that is not prepared.

    A prepared model, as every one that is compiled inside `data_parallel()`, does both by itself: this callback does
    nothing then, wherever it stands, and stays for old scripts and for models that are left unprepared.

    For these, when training begins, all model variables (weights that are not trained and seed states too) and all
    optimizer variables take the values of rank 0. At the end of each epoch every number in the logs becomes
    $\frac{1}{N} \sum_p v_p$, with $N$ the number of processes and $v_p$ the number on process $p$. What comes after
    it in the list of callbacks then makes the same decision everywhere: `ReduceLROnPlateau`, `EarlyStopping` and
    `ModelCheckpoint` see the same `val_loss` on each rank. So does the history that `fit` returns. It must stand before
    them, or they would see the numbers of their own rank only.

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
        model = self.model
        if is_prepared(model):
            return
        for callback in _standing_before(self):
            if hasattr(callback, "monitor"):
                name = type(callback).__name__
                raise ValueError(
                    "`SyncReplicas` must stand before the callbacks that watch a metric, or these see the numbers of "
                    f"their own rank, and ranks decide differently. Received: `{name}` before it. "
                    f"Use `callbacks=[SyncReplicas(), ..., {name}(...)]`."
                )
        if processes.needs_initial_broadcast:
            for part in reducers_in(model):
                part.peers.check()
                part.peers.check_parts()
        placement.broadcast_state(model.variables, _optimizer_variables(model))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages `logs` in place, which is the dict that the callbacks after this one get."""
        if logs is None or is_prepared(self.model):
            return
        everyones = processes.gather_objects(dict(logs))
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
    themselves while they train is not: the moving statistics of a `BatchNormalization` are each rank's own on PyTorch
    within an epoch, and each replica's on TensorFlow where the model is not prepared. Buffers of `torch.nn` modules are
    compared from the end of an epoch of a prepared model until the next one trains. What a
    `CrossShard(group_assignment=...)` updates is compared within its groups only, since groups differ on purpose, and
    with `LocalSGD` weights only where a round has just ended.

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

        In a custom training loop, `check` compares at once:

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
        fingerprints = placement.fingerprints(variables)
        self._alone = len(fingerprints) == 1
        found = [
            f"`{variable.path}` on {where}"
            for variable, column, groups in zip(variables, fingerprints.T, _groups(model, variables, len(fingerprints)))
            for group in groups
            if (where := _disagreeing_replicas(column, group))
        ]
        if found:
            raise RuntimeError(
                "All replicas must have the same weights and optimizer state, bit for bit. "
                f"Received, after {self._num_batches} batches of this `fit`: another value of "
                f"{check.listed(found, '; of ')}. "
                "Is every gradient reduced, does any replica change variables by itself, is the memory sound? "
                "Go on from the last checkpoint; each `fit` of a prepared model starts all replicas equal."
            )


def _standing_before(callback: keras.callbacks.Callback) -> list[Any]:
    """The callbacks before it in the list whose call is running."""
    # A callback cannot see the list that it is in.
    running = running_instance(keras.callbacks.CallbackList)
    callbacks = [] if running is None else list(running.callbacks)
    places = [i for i, other in enumerate(callbacks) if other is callback]
    return callbacks[: places[0]] if places else []


def _optimizer_variables(model: Any) -> list[Variable]:
    return [v for o in optimizers_of(model) for v in shared_variables(o)]


def _compared(model: Any) -> list[Variable]:
    """The variables that must be equal on all replicas, in the order of the model's."""
    frozen = {id(v) for layer in layers_of(model) if not layer.trainable for v in layer.weights}
    weights = [v for v in model.weights if v.trainable or id(v) in frozen]
    return weights + equal_buffers(model) + _optimizer_variables(model)


def _groups(model: Any, variables: Sequence[Variable], num_replicas: int) -> list[Groups]:
    """For each variable the groups in which it must be equal: those of the optimizer that updates it."""
    # As the number of the group that each replica is in, so that two assignments cut each other.
    number_of: dict[int, list[tuple[int, ...]]] = {}
    of_all: list[tuple[int, ...]] = [()] * num_replicas
    for part in [part for optimizer in optimizers_of(model) for part in (optimizer, *descendants(optimizer))]:
        groups: Groups | None = getattr(part, "group_assignment", None) if num_replicas > 1 else None
        if isinstance(part, CrossShard) and any(extension.are_apart for extension in part.extension_stages):
            groups = [[i] for i in range(num_replicas)]
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


def _disagreeing_replicas(fingerprints: np.ndarray, group: Sequence[int]) -> str:
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
