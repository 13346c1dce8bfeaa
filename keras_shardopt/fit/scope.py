"""`data_parallel()`: the scope that sets up the replicas and prepares models."""

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
from keras_shardopt.backends import jobs
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.models import equal_buffers
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.processes import World
from keras_shardopt.fit.compiled import preparing_compiled
from keras_shardopt.numerics import Variable
from keras_shardopt.optimizers.made import collected

# A scope whose block has ended, but whose distribution or process group `fit` still needs. The next scope closes it.
_lingering: data_parallel | None = None


class data_parallel:
    """A scope in which to build a model for data-parallel training, on all local accelerators or processes of this job.

    | backend | the scope sets up |
    |---|---|
    | TensorFlow | a `MirroredStrategy` (TPU: `TPUStrategy`; with workers in `TF_CONFIG`, a multi-worker strategy) |
    | JAX | `keras.distribution.DataParallel` over the devices of all processes; it connects the processes if needed |
    | PyTorch | the process group of the ranks that `torchrun` started: "nccl" with CUDA, otherwise "gloo" |

    The environment describes the processes of `python -m keras_shardopt.launch`, `torchrun`, `srun`, `mpirun`,
    `mpiexec` and `flux run`, so the scope finds these.

    Without accelerators, the scope uses all logical CPU devices. With a single device or process, it sets up nothing.
    It uses an existing TensorFlow strategy scope or process group unchanged. On JAX, it replaces a `DataParallel`
    until its end; any other distribution is an error.

    The scope prepares each model that is compiled or loaded inside with a `CrossShard`, so `fit` equals training on one
    process with the whole batch; see `keras_shardopt.prepare`. With a plain optimizer, PyTorch ranks would train
    separately: `compile` warns, and `fit` and `train_on_batch` raise.

    Call `model.fit` inside the block or after it. `fit` also prepares a model that was built inside and compiled later.
    The end of the block undoes all changes, with one exception on JAX and PyTorch: if a `CrossShard` from inside is
    alive, the distribution or process group stays until `close()`, the next scope, or the end of the program.

    All processes make the same calls with the same data. Each uses its rows of every batch, and `batch_size` is the
    global batch size. To pass data that is already split, use `shard_data` or `auto_shard=False`. Models start with
    equal weights: if Keras's random seed differs between ranks, all take that of rank 0. In training steps, each rank
    derives different random numbers from it, for example for dropout.

    Args:
        num_replicas: int >= 1 or None. The number of replicas; None (default) takes all devices. Without accelerators,
            it creates that number of CPU devices, before TensorFlow or JAX starts. (With several JAX devices on few
            cores, it also sets the environment variable `NPROC` unless it is set, because XLA would run out of
            threads.) On PyTorch, it must equal the number of processes. With 1, processes that `srun` or `mpirun`
            started train alone.
        timeout: float > 0 in seconds, `datetime.timedelta`, or None. The time a PyTorch rank waits for the others
            before it raises; None (default) is PyTorch's limit (30 minutes with "gloo", 10 with "nccl"). A dead rank is
            detected at once. On JAX and TensorFlow, `timeout` is set when the processes connect: in the first scope,
            unless the program has connected them before. It also limits the wait for processes that start late; after
            it, JAX and TensorFlow end the process. With one process, `timeout` has no effect.
        prepare: bool. True (default) calls `keras_shardopt.prepare` on each model that is compiled or loaded inside
            with a `CrossShard`. False leaves models unprepared.
        auto_shard: bool. True (default) divides each batch among processes. False: each process passes its own part to
            `fit`, `evaluate` and `predict`, and `batch_size` counts its own rows.

    Raises:
        ValueError: if `num_replicas` is less than 1, larger than the number of devices, or not the number of processes;
            if `timeout` is out of range or too late to set; on JAX, if a `ModelParallel` is active.
        TypeError: if `num_replicas` is not an int, or `timeout` is not a duration.
        RuntimeError: if TensorFlow already runs with fewer CPU devices; if a rank does not join; if the environment
            describes a job of several processes that this process does not join, for example because of another
            `KERAS_BACKEND`. Later, on all other ranks, if a rank has died or stalled. The error names that rank.

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
            num_replicas = check.integer("num_replicas", num_replicas, fix="Omit `num_replicas` to use all devices.")
        self._requested = num_replicas
        self._timeout = _duration(timeout)
        self._prepare = check.flag("prepare", prepare)
        self._auto_shard = check.flag("auto_shard", auto_shard)
        self._world: World | None = None
        self._open = contextlib.ExitStack()
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> data_parallel:
        if self._world is not None:
            raise RuntimeError("This `data_parallel()` scope has been entered before. Create a new scope.")
        install("optimizers")
        if _lingering is not None:
            _lingering.close()
        with contextlib.ExitStack() as opening:
            world = opening.enter_context(processes.open(self._requested, self._timeout))
            jobs.check_joined(world.num_processes, next(iter(processes.versions()), "another backend"))
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
        except BaseException:  # an error from `prepare` of a model that had no optimizer when it was compiled
            self._open.close()
            raise
        if kind is None and self._entered().persists and len(self._made_inside):
            global _lingering
            _lingering = self
            atexit.register(self.close)
        else:
            self._open.close()

    def close(self) -> None:
        """Undoes all changes that the scope has made, such as the distribution or process group.

        On JAX and PyTorch, a model that was built inside the scope cannot train afterwards: `fit` raises an error,
        because replicas would repeat the same work or diverge.
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
        command = f", started by {jobs.joined[0]}" if jobs.joined and world.num_processes > 1 else ""
        return f"<data_parallel: {replicas}, process {world.process_id} of {world.num_processes}{devices}{command}>"

    def _entered(self) -> World:
        if self._world is None:
            raise RuntimeError(
                "The scope has no replicas before it is entered. Use `with data_parallel() as replicas:`."
            )
        return self._world

    @property
    def num_replicas(self) -> int:
        """The number of replicas that train together."""
        return self._entered().num_replicas

    @property
    def replica_id(self) -> int:
        """The index of the first replica of this process (its only replica on PyTorch)."""
        return self._entered().replica_id

    @property
    def is_chief(self) -> bool:
        """Whether this process should print and write files."""
        return self._entered().is_chief

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self._entered().num_processes

    @property
    def process_id(self) -> int:
        """The index of this process, from 0."""
        return self._entered().process_id

    def largest_difference(self, model: Any) -> float:
        """Returns the largest absolute difference between two replicas' copies of the model's trainable weights.

        It should be exactly 0. Non-trainable weights are not compared, because moving statistics of a
        `BatchNormalization` are per-rank on PyTorch within an epoch. Buffers of `torch.nn` modules in a prepared model
        are compared, except within an epoch. All processes must call this method together.
        """
        return largest_difference([*model.trainable_weights, *equal_buffers(model)])


def largest_difference(variables: Sequence[Variable]) -> float:
    """Return the largest absolute difference between two replicas' copies of any variable in `variables`."""
    if placement.state_sharding == "slices":
        replicas = runtime.communicator("")
        if replicas.num_replicas == 1 or not variables:
            return 0.0
        processes.gather_objects(len(variables))  # raises an error if some ranks call another method
        values = [ops.cast(ops.stop_gradient(ops.convert_to_tensor(v)), "float64") for v in variables]
        flat = ops.concatenate([ops.reshape(value, (-1,)) for value in values])
        largest, smallest = replicas.all_reduce([flat, -flat], "max")
        # Values may be infinite, as in a mask. The difference of equal infinities would be NaN, so make it 0.
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
    if timeout is None:
        return None
    is_delta = isinstance(timeout, datetime.timedelta)
    if isinstance(timeout, bool) or not (is_delta or isinstance(timeout, Real)):
        raise TypeError(
            "`timeout` must be a number of seconds, a `datetime.timedelta` or None. "
            f"Received: timeout={timeout!r} (of type {type(timeout).__name__})"
        )
    # A larger timeout would not fit a `timedelta`, or the 64 bits in which PyTorch counts milliseconds.
    if not 0.001 <= (timeout.total_seconds() if is_delta else timeout) <= 365 * 24 * 3600:
        raise ValueError(
            f"`timeout` must be at least a millisecond and at most a year, in seconds. Received: timeout={timeout!r}. "
            "Leave `timeout` out to use the backend's default."
        )
    return timeout if is_delta else datetime.timedelta(seconds=float(timeout))
