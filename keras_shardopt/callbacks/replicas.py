"""Callbacks for several replicas: `SyncReplicas` (equal start, averaged logs) and `CheckReplicas` (equal weights)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.keras_callers import running_instance
from keras_shardopt.backends.models import equal_buffers, is_prepared, layers_of, optimizers_of
from keras_shardopt.checkpoint.training_state import cross_shards_of
from keras_shardopt.numerics import Groups, Variable
from keras_shardopt.optimizers.cross_shard import CrossShard
from keras_shardopt.wrapping.chain import chain_of, shared_variables


class SyncReplicas(keras.callbacks.Callback):
    r"""Starts all replicas with equal variables, and averages the logs of each epoch over processes.

    Only models that are not prepared (see `prepare`) need this callback. A prepared model, such as a model compiled
    inside `data_parallel()`, copies variables and averages logs itself. Then the callback does nothing.

    When training begins, all model variables (frozen weights and seed states included) and all optimizer variables take
    the values of rank 0. At the end of each epoch, every number in the logs becomes $\frac{1}{N} \sum_p v_p$, with $N$
    the number of processes and $v_p$ the number on process $p$. Later callbacks in the list, and the history that `fit`
    returns, get the averages. So `ReduceLROnPlateau`, `EarlyStopping` and `ModelCheckpoint` make the same decision on
    every rank. Put `SyncReplicas` before those callbacks, otherwise they read the numbers of one rank.

    Processes are the ranks on PyTorch, and the processes of `jax.distributed` on JAX. (On JAX, Keras itself logs
    metrics over all processes.) If one process holds all replicas, the callback does nothing.

    Raises:
        ValueError: when training begins, if a callback with an attribute `monitor` comes before this callback, or if
            variables differ in shape or dtype between processes; at the end of an epoch, if processes log different
            metrics. Each of the last two errors is raised on every process.

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
        `BroadcastGlobalVariablesCallback` and `MetricAverageCallback` of Horovod.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Copies rank 0's variables to all processes."""
        model = self.model
        if is_prepared(model):
            return
        for callback in _callbacks_before(self):
            if hasattr(callback, "monitor"):
                name = type(callback).__name__
                raise ValueError(
                    "`SyncReplicas` must stand before callbacks that monitor a metric. Otherwise these callbacks read "
                    f"the metrics of one rank, and ranks make different decisions. Received: `{name}` before "
                    f"`SyncReplicas`. Use `callbacks=[SyncReplicas(), ..., {name}(...)]`."
                )
        if processes.needs_initial_broadcast:
            for part in cross_shards_of(model):
                part.peers.check()
                part.peers.check_parts()
        placement.broadcast_state(model.variables, _optimizer_variables(model))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in `logs` by their averages, because later callbacks receive the same dict."""
        if logs is None or is_prepared(self.model):
            return
        everyones = processes.gather_objects(dict(logs))
        for process, theirs in enumerate(everyones):
            if theirs.keys() != everyones[0].keys():
                raise ValueError(
                    f"All processes must log the same metrics. Received after epoch {epoch}: {sorted(everyones[0])} on "
                    f"process 0, {sorted(theirs)} on process {process}. Compile with the same metrics and "
                    "pass `validation_data` on every process, or on none."
                )
        for name in logs:
            logs[name] = _mean([theirs[name] for theirs in everyones])


class CheckReplicas(keras.callbacks.Callback):
    """Compares the replicas' weights and optimizer state bit by bit, and stops training if they differ.

    Without a check, replicas with different weights continue to train: each applies the averaged gradients to its
    weights. This callback checks after every `every` training batches, and when training ends. For a check, replicas
    exchange short hashes of the variables. A hash detects each single flipped bit, and misses any other difference
    with a probability of 1 in 2**32. With one replica, the callback does nothing.

    It compares trainable weights, weights of frozen layers, and all optimizer variables. Other state of layers is
    allowed to differ: moving statistics of a `BatchNormalization` are per-rank on PyTorch within an epoch, and
    per-replica on TensorFlow without `prepare(model)`. Buffers of `torch.nn` modules are compared between two
    epochs, and only with `prepare(model)`. Variables that a `CrossShard(group_assignment=...)` updates are compared
    within its groups. With `LocalSGD`, weights are compared only right after a synchronization.

    Args:
        every: int >= 1 (default 100). Number of training batches between checks.

    Raises:
        TypeError: if `every` is not an int.
        ValueError: if `every` is less than 1.
        RuntimeError: from training, on every process, if replicas differ. The error names each variable that differs,
            and the replicas that differ from the majority.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> with ks.data_parallel() as replicas:
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(ks.CrossShard("sgd"), "mse")
        >>> check = ks.callbacks.CheckReplicas(every=100)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[check], verbose=0)
        >>> replicas.close()

        In a custom training loop, call `check`:

        >>> check.set_model(model)
        >>> check.check()
    """

    def __init__(self, every: int = 100) -> None:
        every = check.integer("every", every, fix="Pass a number of training batches.")
        super().__init__()
        self.every = every
        self._restart()

    def _restart(self) -> None:
        self._last_batch = -1
        self._num_batches = 0
        self._num_unchecked = 0
        self._has_one_replica = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the counts of batches."""
        self._restart()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the number of the last batch, because each epoch numbers its batches from 0."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the replicas if `every` batches have passed since the last check."""
        # With `steps_per_execution`, Keras calls this method once for several batches, so count by batch numbers.
        self._num_batches += batch - self._last_batch
        self._num_unchecked += batch - self._last_batch
        self._last_batch = batch
        if self._num_unchecked >= self.every and not self._has_one_replica:
            self.check()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the replicas if batches have passed since the last check."""
        if self._num_unchecked and not self._has_one_replica:
            self.check()

    def check(self) -> None:
        """Compares the replicas now. All processes must call it together.

        Raises:
            RuntimeError: on every process, if replicas differ.
        """
        self._num_unchecked = 0
        # Read `self.model` only for a check, because on JAX this copies the training state into the variables.
        model = self.model
        variables = _compared(model)
        fingerprints = placement.fingerprints(variables)
        self._has_one_replica = len(fingerprints) == 1
        found = [
            f"`{variable.path}` on {where}"
            for variable, column, groups in zip(variables, fingerprints.T, _groups(model, variables, len(fingerprints)))
            for group in groups
            if (where := _disagreeing_replicas(column, group))
        ]
        if found:
            raise RuntimeError(
                "All replicas must have the same weights and optimizer state, bit for bit. Received, after "
                f"{self._num_batches} batches of this `fit`: different values of {check.listed(found, '; of ')}. Check "
                "that all gradients are averaged, that no replica alone changes variables, and that memory has no "
                "errors. Load the last checkpoint, and call `fit` again, so all replicas start with the same weights."
            )


def _callbacks_before(callback: keras.callbacks.Callback) -> list[Any]:
    """Returns the callbacks before this one in the list of `fit`.

    A callback has no reference to its list, so the function finds the list on the call stack.
    """
    running = running_instance(keras.callbacks.CallbackList)
    callbacks = [] if running is None else list(running.callbacks)
    places = [i for i, other in enumerate(callbacks) if other is callback]
    return callbacks[: places[0]] if places else []


def _optimizer_variables(model: Any) -> list[Variable]:
    return [v for o in optimizers_of(model) for v in shared_variables(o)]


def _compared(model: Any) -> list[Variable]:
    """Returns the variables that must be equal on all replicas: those of the model, then those of its optimizers."""
    frozen = {id(v) for layer in layers_of(model) if not layer.trainable for v in layer.weights}
    weights = [v for v in model.weights if v.trainable or id(v) in frozen]
    return weights + equal_buffers(model) + _optimizer_variables(model)


def _groups(model: Any, variables: Sequence[Variable], num_replicas: int) -> list[Groups]:
    """Returns, per variable, the groups of replicas that must have equal values."""
    # For each variable, a replica has a label: its group in each `group_assignment` that applies to the variable.
    # Replicas with equal labels must have equal values.
    labels_of: dict[int, list[tuple[int, ...]]] = {}
    all_labels: list[tuple[int, ...]] = [()] * num_replicas
    for part in [part for optimizer in optimizers_of(model) for part in chain_of(optimizer)]:
        groups: Groups | None = getattr(part, "group_assignment", None) if num_replicas > 1 else None
        if isinstance(part, CrossShard) and any(extension.weights_differ for extension in part.extension_stages):
            groups = [[i] for i in range(num_replicas)]
        if groups is None and not isinstance(part, CrossShard):
            continue
        group_of = dict.fromkeys(range(num_replicas), 0)
        group_of.update({replica: i for i, group in enumerate(groups or []) for replica in group})
        all_labels = [(*label, group_of[i]) for i, label in enumerate(all_labels)]
        for variable in [*part._trainable_variables, *part.variables]:
            before = labels_of.get(id(variable), [()] * num_replicas)
            labels_of[id(variable)] = [(*label, group_of[i]) for i, label in enumerate(before)]
    found: list[Groups] = []
    for variable in variables:
        # A variable that no optimizer updates must be equal only on replicas that share a group in every optimizer.
        labels = labels_of.get(id(variable), all_labels)
        found.append([[i for i in range(num_replicas) if labels[i] == label] for label in dict.fromkeys(labels)])
    return found


def _disagreeing_replicas(fingerprints: np.ndarray, group: Sequence[int]) -> str:
    """Describes how fingerprints in a group differ, such as "replica 1, against replicas 0 and 2"; "" if all agree."""
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
