"""Setting up replicas: `with data_parallel():`."""

from __future__ import annotations

import atexit
import contextlib
import datetime
from collections.abc import Sequence
from numbers import Real
from types import TracebackType
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.jobs import check_joined
from keras_shardopt.backends.models import equal_buffers
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.processes import World
from keras_shardopt.fit.compiled import preparing_compiled
from keras_shardopt.numerics import Variable
from keras_shardopt.optimizers.made import collected

# The scope that was left but stays in force for `fit`. There is one at most: the next scope closes it.
_lingering: data_parallel | None = None


class data_parallel:
    """A scope in which a model is built for data-parallel training on all local accelerators.

    | backend | what the scope sets up |
    |---|---|
    | TensorFlow | a `MirroredStrategy` (TPU: `TPUStrategy`); of the workers of `TF_CONFIG` a multi-worker one |
    | JAX | `keras.distribution.DataParallel` over the devices of all processes, which it connects if need be |
    | PyTorch | the process group of the ranks that `torchrun` started: "nccl" with CUDA, else "gloo" |

    Without accelerators the devices are all logical CPU devices; with a single device or process the scope sets up
    nothing. Where a TensorFlow strategy scope or a process group is open already, it is used as it is; on JAX a
    `DataParallel` is replaced until the scope is left, and a distribution with layouts of its own is an error.

    A model that is compiled or loaded inside, with a `CrossShard`, is prepared: its `fit` does what one process with
    the whole batch would do, see `keras_shardopt.prepare`. On ranks of PyTorch they would train apart with a
    plain optimizer: `compile` warns of it, and `fit` and `train_on_batch` of a model made or compiled inside raise.

    `model.fit` may be called inside the block or after it, and so may another `compile`; `fit` prepares a model that
    was made inside and compiled after the block. Leaving the block restores what it changed, except where
    JAX and PyTorch still need it for `fit`: if a `CrossShard` made inside is alive, the distribution or process
    group stays until `close()`, until the next scope is entered, or until the program ends.

    With several processes each one makes the same calls with the same data: of every batch
    a prepared model works on the rows of its process, and `batch_size` is the global one. Data that is divided
    already comes from `shard_data`, or with `auto_shard=False`. Ranks that do not agree on Keras' random seed take rank
    0's, so that models start equal; in its training steps, each then draws random numbers of its own from it.

    Args:
        num_replicas: int >= 1 or None. How many replicas; None (default) takes all devices. On a machine without
            accelerators that many CPU devices are made, which must happen before TensorFlow or JAX has started. (For
            JAX with several devices on few cores the environment variable `NPROC` is then set too, unless it is
            already: XLA would run out of threads.) On PyTorch it must equal the number of processes.
        timeout: float > 0 in seconds, `datetime.timedelta`, or None. For ranks of PyTorch: how long a rank waits for
            the others before it raises; None (default) is PyTorch's own limit (30 minutes with "gloo", 10 with
            "nccl"). A rank that dies is noticed at once. For processes of JAX and workers of TensorFlow it is set where
            they are connected: by the first scope of the program, unless the program has done it before. It bounds the
            wait for the others at the start, too, which ends the process on JAX and TensorFlow. One process waits for
            nobody.
        prepare: bool. True (default) prepares each model that is compiled or loaded inside and trains with a
            `CrossShard`, as `keras_shardopt.prepare` does. False leaves that to you.
        auto_shard: bool. True (default) divides each batch among processes. False takes what a process gives to `fit`,
            `evaluate` and `predict` as its own part, and `batch_size` as that of its own batches.

    Raises:
        ValueError: if `num_replicas` is less than 1, more than there are devices, or not the number of processes; if
            `timeout` is out of range, or cannot be set any more; on JAX, if a `ModelParallel` is active.
        TypeError: if `num_replicas` is not an int, or `timeout` not a duration.
        RuntimeError: if TensorFlow runs already with fewer CPU devices; if a rank does not come; if the environment
            names a job of several processes that this one does not join, as with another `KERAS_BACKEND`. Later, from
            what needs all ranks, if one has died or stalled: on every other rank, with the number of that rank.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> with ks.data_parallel() as replicas:
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer=ks.CrossShard(keras.optimizers.Adam()), loss="mse")
        >>> replicas.is_chief
        True
        >>> replicas.close()
    """

    def __init__(
        self,
        num_replicas: int | None = None,
        timeout: float | datetime.timedelta | None = None,
        prepare: bool = True,
        auto_shard: bool = True,
    ) -> None:
        if num_replicas is not None:
            num_replicas = check.integer("num_replicas", num_replicas, fix="Leave it out to take all devices.")
        self._requested = num_replicas
        self._timeout = _duration(timeout)
        self._prepare = check.flag("prepare", prepare)
        self._auto_shard = check.flag("auto_shard", auto_shard)
        self._world: World | None = None
        self._open = contextlib.ExitStack()
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> data_parallel:
        if self._world is not None:
            raise RuntimeError("This `data_parallel()` scope has been entered before. Make a new one.")
        install("optimizers")
        if _lingering is not None:
            _lingering.close()
        with contextlib.ExitStack() as opening:
            world = opening.enter_context(processes.open(self._requested, self._timeout))
            check_joined(world.num_processes, next(iter(processes.versions()), "another backend"))
            self._world, self._open = world, opening.pop_all()
        if self._world.num_replicas > 1:
            install("batches")
        self._made_inside = self._watching.enter_context(collected())
        are_several = self._world.num_replicas > 1
        self._watching.enter_context(preparing_compiled(self._prepare, self._auto_shard, are_several))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._watching.__exit__(kind, error, traceback)
        except BaseException:  # of a model that has waited for its optimizers
            self._open.close()
            raise
        if kind is None and self._entered().persists and len(self._made_inside):
            global _lingering
            _lingering = self
            atexit.register(self.close)
        else:
            self._open.close()

    def close(self) -> None:
        """Restores what the scope changed.

        On JAX and PyTorch, training a model that was made inside is an error afterwards: its replicas would each
        repeat the same work, or drift apart.
        """
        global _lingering
        if _lingering is self:
            _lingering = None
        atexit.unregister(self.close)
        self._open.close()
        if self._world is not None:
            self._world.forget()

    def __repr__(self) -> str:
        if self._world is None:
            return "<data_parallel: not entered>"
        world = self._world
        replicas = f"{world.num_replicas} replica{'s' if world.num_replicas > 1 else ''}"
        devices = f", devices {', '.join(world.devices)}" if world.devices else ""
        return f"<data_parallel: {replicas}, process {world.process_id} of {world.num_processes}{devices}>"

    def _entered(self) -> World:
        if self._world is None:
            raise RuntimeError("The replicas are known inside the scope only. Enter it: `with data_parallel() as r:`")
        return self._world

    @property
    def num_replicas(self) -> int:
        """How many replicas train together."""
        return self._entered().num_replicas

    @property
    def replica_id(self) -> int:
        """The first (on PyTorch the only) replica that this process runs."""
        return self._entered().replica_id

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that should print and write files."""
        return self._entered().is_chief

    @property
    def num_processes(self) -> int:
        """How many processes there are. Each loads data: all of it, or a part where you divide it yourself."""
        return self._entered().num_processes

    @property
    def process_id(self) -> int:
        """Which of `num_processes` this is, from 0."""
        return self._entered().process_id

    def largest_difference(self, model: Any) -> float:
        """The largest absolute difference between any two replicas' copies of the model's trainable weights.

        It should be exactly 0. Weights that are not trained do not count: the moving statistics of a
        `BatchNormalization` are each rank's own on PyTorch, within an epoch. Buffers of `torch.nn` modules do count
        for a prepared model, except within an epoch. All processes must call it together.
        """
        return largest_difference([*model.trainable_weights, *equal_buffers(model)])


def largest_difference(variables: Sequence[Variable]) -> float:
    """As `data_parallel.largest_difference`, of any variables."""
    if placement.state_sharding == "slices":
        replicas = runtime.communicator("")
        if replicas.num_replicas == 1 or not variables:
            return 0.0
        processes.gather_objects(len(variables))  # ranks that do something else learn of it
        values = [ops.cast(ops.stop_gradient(ops.convert_to_tensor(v)), "float64") for v in variables]
        flat = ops.concatenate([ops.reshape(value, (-1,)) for value in values])
        largest, smallest = replicas.all_reduce([flat, -flat], "max")
        # A mask of infinities minus itself is no number.
        differences = ops.where(ops.equal(largest, -smallest), 0.0, largest + smallest)
        return float(ops.convert_to_numpy(ops.max(differences)))
    largest = 0.0
    for variable in variables:
        first, *others = [array.astype("float64") for array in placement.replica_values(variable)]
        for other in others:
            largest = max(largest, float(np.max(np.abs(other - first), initial=0.0)))
    if processes.process()[0] > 1 and variables:
        prints = placement.fingerprints(variables)
        differing = [v for v, column in zip(variables, prints.T) if (column != column[0]).any()]
        mine = [placement.replica_values(v)[0].astype("float64") for v in differing]
        with placement.colocate_with(variables[0]):
            everyones = processes.gather_objects(mine) if differing else [mine]
        for first, *others in zip(*everyones):
            largest = max(largest, *[float(np.max(np.abs(other - first), initial=0.0)) for other in others])
    return largest


def _duration(timeout: Any) -> datetime.timedelta | None:
    if timeout is None or isinstance(timeout, datetime.timedelta):
        duration = timeout
    elif isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(
            "`timeout` must be a number of seconds, a `datetime.timedelta` or None. "
            f"Received: timeout={timeout!r} (of type {type(timeout).__name__})"
        )
    else:
        # PyTorch counts milliseconds, in 64 bits.
        duration = datetime.timedelta(seconds=float(timeout)) if _in_range(timeout) else None
    if duration is None and timeout is None:
        return None
    if duration is None or not _in_range(duration.total_seconds()):
        raise ValueError(
            "`timeout` must be at least a millisecond and at most a year, in seconds. "
            f"Received: timeout={timeout!r}. Leave it out for the backend's own."
        )
    return duration


def _in_range(seconds: Any) -> bool:
    return bool(0.001 <= seconds <= 365 * 24 * 3600)
