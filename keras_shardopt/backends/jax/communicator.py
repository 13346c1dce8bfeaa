"""Replicas of JAX programs: mapped axes (`shard_map`, `pmap`) and GSPMD under a `keras.distribution`.

Private names of Keras touched here (a test holds each of them):
    `Variable._layout`, `Variable._value` - the sharding of a variable and the array that has it.
    `Variable._shape`, `Variable._ndim` - the shape of a variable, and how many dimensions that has.
    `keras.src.backend.common.stateless_scope.get_stateless_scope` - the scope that a new one opens in.
    `StatelessScope.add_update`, `get_current_value` - how variables write to a scope and read from it.
    `keras.src.backend.jax.trainer` - the module whose `predict` asks for `DataParallel.auto_shard_dataset`.

Of JAX: `jax._src.distributed.global_state.client` - the store of a job of several processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_shardopt._typing import Gradients, Groups, ReduceOp, Tensor, Variable
from keras_shardopt.backends.communicator import AllReplicasAtOnce, Arrival, ReplicaBackend, SingleReplica
from keras_shardopt.backends.jax.placement import dividing_axis
from keras_shardopt.backends.processes import World
from keras_shardopt.backends.runtime import Framework


class MappedAxis(ReplicaBackend):
    """The replicas along a named axis of the `shard_map` or `pmap` that is being traced."""

    def __init__(self, axis_name: str) -> None:
        self._axis = axis_name
        self.num_replicas = jax.lax.axis_size(axis_name)
        self.is_chief = jax.process_index() == 0
        self.spans_processes = _spans_processes(self.num_replicas)

    @property
    def replica_id(self) -> Any:
        return jax.lax.axis_index(self._axis)

    def arrival(self, grads: Gradients, variables: Sequence[Variable]) -> Arrival:
        # shard_map(check_vma=True) knows which values vary along the axis, and sums the gradients of a weight
        # that does not. Elsewhere nothing is known to vary, not even the index along the axis.
        if not self._knows_what_varies:
            return Arrival.LOCAL
        varying = [self._varies(grad) for grad in grads if grad is not None]
        if all(varying):
            return Arrival.LOCAL
        if not any(varying):
            return Arrival.SUMMED
        names = [getattr(v, "path", str(v)) for g, v in zip(grads, variables) if g is not None and self._varies(g)]
        raise ValueError(
            "Gradients must arrive alike: either all local (weights cast to varying) or all summed by `shard_map`. "
            f"Received: local gradients for {names} only. "
            f"Use `jax.lax.pcast(w, {self._axis!r}, to='varying')` on all weights or on none."
        )

    @property
    def _knows_what_varies(self) -> bool:
        return self._varies(self.replica_id)

    def varying(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The values as if they were each replica's own, so that their gradients are."""
        if not self._knows_what_varies:
            return list(values)
        return [v if self._varies(v) else jax.lax.pcast(v, (self._axis,), to="varying") for v in values]

    def _varies(self, value: Any) -> bool:
        aval: Any = jax.typeof(value)
        if hasattr(aval, "vma"):  # until JAX 0.9
            return self._axis in aval.vma
        return self._axis in aval.mat.varying

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        if not tensors:
            return []
        if groups is not None and op != "max" and self._knows_what_varies:
            return self._all_reduce_gathered(tensors, op, groups)
        reduce = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}[op]
        return list(reduce(list(tensors), self._axis, axis_index_groups=groups))

    def _all_reduce_gathered(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups) -> list[Tensor]:
        # shard_map(check_vma=True) has no sum within groups: NotImplementedError, up to JAX 0.10 at least.
        group_of = {replica: group for group in groups for replica in group}
        peers = jax.numpy.array([group_of[replica] for replica in range(self.num_replicas)])[self.replica_id]
        reduce = {"sum": jax.numpy.sum, "mean": jax.numpy.mean}[op]
        return [reduce(jax.lax.all_gather(t, self._axis)[peers], axis=0) for t in tensors]

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        size = self.num_replicas if groups is None else len(groups[0])
        scattered = [jax.lax.psum_scatter(t, self._axis, axis_index_groups=groups, tiled=True) for t in tensors]
        return [t / size for t in scattered] if op == "mean" else scattered

    def all_gather(self, tensors: Sequence[Tensor], groups: Groups | None = None) -> list[Tensor]:
        return [jax.lax.all_gather(t, self._axis, axis_index_groups=groups, tiled=True) for t in tensors]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0, groups: Groups | None = None) -> list[Tensor]:
        roots = jax.numpy.array([root] if groups is None else [group[root] for group in groups])
        from_root = (self.replica_id == roots).any()
        chosen = [jax.numpy.where(from_root, t, jax.numpy.zeros_like(t)) for t in tensors]
        return self.all_reduce(chosen, "sum", groups)


class Jax(Framework):
    """JAX: replicas are devices of one program, in one process or several."""

    updates_are_stateless = True
    steps_are_traced = True
    outlives_its_block = True
    processes_start_apart = True

    def __init__(self) -> None:
        super().__init__()
        # The distribution that is not to be seen just now.
        self._set_aside: Any = None
        # That of `data_parallel`.
        self._opened: keras.distribution.DataParallel | None = None

    def makes_variables_together(self) -> bool:
        return _spans_processes(batch_size_of(keras.distribution.distribution()))

    def replicas(self, axis_name: str) -> ReplicaBackend:
        try:
            jax.lax.axis_size(axis_name)
        except NameError:
            pass
        else:
            return MappedAxis(axis_name)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual == (_UNNAMED_PMAP_AXIS,):
            raise ValueError(
                "The axis of `pmap` must have a name, or gradients would not be reduced over it. "
                f"Received: `pmap` without one. Use `jax.pmap(step, axis_name={axis_name!r})`."
            )
        if manual:
            raise ValueError(
                "`axis_name` must be an axis of the `shard_map` or `pmap` around the update, or gradients would not "
                f"be reduced. Received: axis_name={axis_name!r}, axes here: {tuple(manual)}. "
                f"Use `CrossShard(..., axis_name={manual[0]!r})`."
            )
        num_replicas = batch_size_of(keras.distribution.distribution())
        if num_replicas == 1:
            return SingleReplica()
        # GSPMD: one program over the whole batch, which XLA divides among the devices.
        is_chief = jax.process_index() == 0
        return AllReplicasAtOnce(num_replicas, is_chief, "under a `keras.distribution`", _spans_processes(num_replicas))

    def check_ready(self, variables: Sequence[Variable], optimizers: Sequence[Any]) -> None:
        distribution = keras.distribution.distribution()
        if distribution is None and self._opened is not None and jax.process_count() > 1:
            raise ValueError(
                "The distribution of `data_parallel()` must stay active, or each process would train for itself. "
                "Received: none; `keras.backend.clear_session()` takes it away. Call that before `data_parallel()`."
            )
        active = _devices_of(distribution)
        # With one device there is nothing to be on the wrong one.
        active = active if len(active) > 1 else []
        for variable in variables:
            theirs = _devices_of(variable._layout)
            if len(theirs) > 1 and not active:
                raise ValueError(
                    f"`{variable.path}` was made for {len(theirs)} devices, but no distribution is active, so "
                    "each device would repeat the work of all. Train before `data_parallel()` is closed, or build the "
                    "model anew outside it."
                )
            if active and theirs != active:
                made = f"for {len(theirs)} other devices than" if theirs else "before"
                raise ValueError(
                    f"`{variable.path}` was made {made} the active distribution over {len(active)} devices. "
                    "Build the model inside `with keras_shardopt.data_parallel():`, after `set_distribution`."
                )

    def check_can_lay_out(self, variables: Sequence[Variable]) -> None:
        if keras.distribution.distribution() is not None:
            return
        for variable in variables:
            num_devices = _num_devices_of(variable.value)
            if num_devices > 1:
                raise ValueError(
                    "`shard_state=True` divides state among the devices of the active `keras.distribution`, and none "
                    f"is active. Received: `{variable.path}` on {num_devices} devices. Build model and optimizer "
                    "inside `with keras_shardopt.data_parallel():`, or after "
                    "`keras.distribution.set_distribution(keras.distribution.DataParallel())`; or use "
                    "`shard_state=False`."
                )

    def gradients_and_more(
        self, loss: Callable[[], tuple[Tensor, Any]], variables: Sequence[Variable], axis_name: str
    ) -> tuple[list[Tensor | None], Any]:
        replicas = self.replicas(axis_name)
        values = [v.value for v in variables]
        if isinstance(replicas, MappedAxis):
            values = replicas.varying(values)  # or shard_map(check_vma=True) would sum their gradients
        assigned: list[Variable] = []

        def of_values(values: list[Tensor]) -> tuple[Tensor, tuple[list[Tensor], Any]]:
            with ScopeInScope(zip(variables, values)) as scope:
                value, more = loss()
            assigned[:] = scope.assigned
            return value, ([scope.get_current_value(v) for v in assigned], more)

        found, (updates, more) = jax.grad(of_values, has_aux=True)(values)
        for variable, value in zip(assigned, updates):
            if self.note is not None:
                self.note(variable)
            variable.assign(value)
        return list(found), more

    def num_replicas_of_steps(self) -> int:
        return batch_size_of(keras.distribution.distribution())

    def compiled(
        self, function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
    ) -> Callable[..., Tensor]:
        from keras_shardopt.steps import jax as jax_step  # it builds on this module

        return jax_step.compiled(self, function, variables, jit_compile)

    def when(self, condition: Any, action: Callable[[], None], variables: Sequence[Variable]) -> None:
        if not isinstance(condition, jax.core.Tracer):
            super().when(condition, action, variables)
            return
        before = [variable.value for variable in variables]

        def acted() -> list[Tensor]:
            with ScopeInScope(zip(variables, before)) as scope:
                action()
            return [scope.get_current_value(variable) for variable in variables]

        for variable, value in zip(variables, jax.lax.cond(condition, acted, lambda: before)):
            variable.assign(value)

    def update_if(
        self,
        condition: Tensor,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
    ) -> None:
        if not isinstance(condition, jax.core.Tracer):
            super().update_if(condition, update, grads, variables)
            return
        # What is assigned inside a branch must not leave it in a variable: each branch returns all values instead.
        before = [variable.value for variable in variables]

        def updated() -> list[Tensor]:
            with keras.StatelessScope(state_mapping=list(zip(variables, before))) as scope:
                update(grads)
            return [scope.get_current_value(variable) for variable in variables]

        for variable, value in zip(variables, jax.lax.cond(condition, updated, lambda: before)):
            variable.assign(value)

    def stack(self, variables: Sequence[Variable]) -> str | None:
        distribution = keras.distribution.distribution()
        num_replicas = batch_size_of(distribution)
        if num_replicas == 1:
            return None
        axis_name: str = distribution.batch_dim_name
        for variable in variables:
            axes = [axis_name] + [None] * len(variable.shape)
            variable._layout = keras.distribution.TensorLayout(axes, distribution.device_mesh)
            zeros = jax.numpy.zeros((num_replicas, *variable.shape), variable.dtype)
            variable._shape, variable._ndim = zeros.shape, zeros.ndim
            variable._value = keras.distribution.distribute_tensor(zeros, variable._layout)
        return axis_name

    def over_replicas(self, function: Callable[..., Any], stacked: Any) -> Any:
        distribution = keras.distribution.distribution()
        return jax.shard_map(
            lambda own: function(jax.tree.map(lambda value: value[0], own)),
            mesh=distribution.device_mesh.backend_mesh,
            in_specs=jax.sharding.PartitionSpec(distribution.batch_dim_name),
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )(stacked)

    stops_in_step = False

    def is_known(self, value: Any) -> bool:
        return not isinstance(value, jax.core.Tracer)

    def stop_if(
        self, condition: Any, culprit: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        # Nobody can stop a compiled step, on one device or several, without losing the weights that it was given.
        if self.is_known(condition):
            super().stop_if(condition, culprit, names, rule)

    def gradient_of(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        return jax.grad(function)(value)

    lays_out_state = True

    def lay_out(self, variables: Sequence[Variable]) -> None:
        distribution = keras.distribution.distribution()
        num_replicas = batch_size_of(distribution)
        if num_replicas == 1:
            return
        for variable in variables:
            axes = list(getattr(variable._layout, "axes", None) or [None] * len(variable.shape))
            # What a model's own layout divides stays as it is, and is divided once more.
            free = [0 if axis else size for axis, size in zip(axes, variable.shape)]
            chosen = dividing_axis(free, num_replicas)
            if chosen is not None:
                axes[chosen] = distribution.batch_dim_name
                variable._layout = keras.distribution.TensorLayout(axes, distribution.device_mesh)
                variable._value = keras.distribution.distribute_tensor(variable._value, variable._layout)

    def bytes_by_replica(self, variable: Variable) -> list[int]:
        sharding = variable.value.sharding
        held = int(np.prod(sharding.shard_shape(variable.value.shape))) * variable.value.dtype.itemsize
        return [held] * len(sharding.device_set)

    def stored_value(self, variable: Variable) -> np.ndarray:
        value = variable.value
        if value.is_fully_addressable or value.is_fully_replicated:
            return super().stored_value(variable)
        return np.asarray(multihost_utils.process_allgather(value, tiled=True))

    def meet(self, purpose: str, seconds: float, advice: str) -> None:
        if jax.process_count() > 1:
            _meet(purpose, seconds, advice)

    def place_state(self, variables: Sequence[Variable]) -> None:
        distribution = keras.distribution.distribution()
        if distribution is None:
            return
        for variable in variables:
            # A variable made before `set_distribution` lives on one device, and a jitted step refuses to mix it
            # with weights that live on all of them.
            if variable._layout is None:
                variable._layout = distribution.get_variable_layout(variable)
                variable._value = keras.distribution.distribute_tensor(variable._value, variable._layout)

    def versions(self) -> dict[str, str]:
        return {"JAX": jax.__version__}

    def process(self) -> tuple[int, int]:
        return jax.process_count(), jax.process_index()

    @contextlib.contextmanager
    def world(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        if timeout is not None and jax.process_count() > 1:
            raise ValueError(
                "`timeout` cannot be set here for several processes, because JAX has started them. "
                f"Received: timeout={timeout.total_seconds():g} s. Give it to JAX before: "
                "`jax.distributed.initialize(..., heartbeat_timeout_seconds=...)`."
            )
        before = keras.distribution.distribution()
        if before is not None and not isinstance(before, keras.distribution.DataParallel):
            raise ValueError(
                "`data_parallel()` sets a distribution of its own, and the layouts of the active one would be lost. "
                f"Received: {before!r}. Leave `data_parallel()` out, as a `CrossShard` needs no more than the active "
                "distribution; or call `keras.distribution.set_distribution(None)` before."
            )
        _make_cpu_devices(num_replicas)
        devices = keras.distribution.list_devices()
        if num_replicas is not None and num_replicas > len(devices):
            raise ValueError(
                f"`num_replicas` must be at most the number of devices. Received: num_replicas={num_replicas}, "
                f"devices={devices}. On CPU, enter `data_parallel(num_replicas={num_replicas})` before JAX makes its "
                "first array, or start Python with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={num_replicas}."
            )
        devices = devices[:num_replicas]
        num_processes, process_id = self.process()
        distribution = None
        if len(devices) > 1:
            from keras_shardopt.fit import jax as jax_fit  # it builds on this module

            jax_fit.watch_batches()
            # Each process feeds its own rows, on every backend alike, so Keras must not divide them once more.
            kind = keras.distribution.DataParallel if num_processes == 1 else _OverProcesses
            distribution = kind(devices=devices, auto_shard_dataset=False)
            distribution.__dict__[MADE_HERE] = True
        keras.distribution.set_distribution(distribution)
        opened_before, self._opened = self._opened, distribution
        try:
            yield World(
                num_replicas=len(devices),
                replica_id=process_id * (len(devices) // num_processes),
                is_chief=process_id == 0,
                num_processes=num_processes,
                process_id=process_id,
            )
        finally:
            self._opened = opened_before
            if keras.distribution.distribution() in (None, distribution):  # none after `clear_session`
                keras.distribution.set_distribution(before)

    def prepare(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        from keras_shardopt.fit import jax as jax_fit  # it builds on this module

        jax_fit.prepare(model, reducers_of)

    def largest_difference(self, variables: Sequence[Variable]) -> float:
        largest = 0.0
        for variable in variables:
            value = variable.value
            if not value.sharding.is_fully_replicated:
                continue  # each device holds another part; there are no copies to compare
            first, *others = [np.asarray(shard.data, "float64") for shard in value.addressable_shards]
            for other in others:
                largest = max(largest, float(np.max(np.abs(other - first), initial=0.0)))
        return largest

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        values = [variable.value for variable in variables]
        copied = [i for i, value in enumerate(values) if value.sharding.is_fully_replicated]
        meshes = [getattr(values[i].sharding, "mesh", None) for i in copied]
        if not meshes or meshes[0] is None or any(mesh != meshes[0] for mesh in meshes):
            return np.zeros((1, len(values)), "uint64")  # on one device, or each on devices of its own
        mesh = meshes[0]
        found = _fingerprints_on(mesh)([values[i] for i in copied])
        rows = np.zeros((mesh.size, len(values)), "uint64")
        rows[:, copied] = np.asarray(found.addressable_data(0))
        return rows

    def alone(self, function: Callable[[], Any]) -> Any:
        distribution = keras.distribution.distribution()
        if distribution is None or jax.process_count() == 1:
            return function()
        # Under a distribution a new variable is a question to all processes.
        self._set_aside = distribution
        try:
            with _under(None):
                return function()
        finally:
            self._set_aside = None

    def together(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._set_aside is None else _under(self._set_aside)

    def start_equal(self, variables: Sequence[Variable], optimizer_variables: Sequence[Variable]) -> None:
        if jax.process_count() == 1:
            return
        for what, mine in (("model variables", variables), ("optimizer variables", optimizer_variables)):
            everyones = self.gather_objects([(tuple(v.shape), str(v.dtype)) for v in mine])
            for process, theirs in enumerate(everyones):
                if theirs != everyones[0]:
                    raise ValueError(
                        f"All processes must have the same {what}. Received on process 0: {everyones[0]}, "
                        f"on process {process}: {theirs}. Build the same model and optimizer in every process."
                    )
        copied = [v for v in [*variables, *optimizer_variables] if v.value.sharding.is_fully_replicated]
        # As bytes, or the sum by which JAX broadcasts would turn a -0 into a 0.
        arrays = [np.asarray(v.value.addressable_data(0)) for v in copied]
        flat = np.concatenate([np.frombuffer(array.tobytes(), "uint8") for array in arrays])
        roots = np.asarray(multihost_utils.broadcast_one_to_all(flat)).astype("uint8").tobytes()
        start = 0
        for variable, array in zip(copied, arrays):
            new = np.frombuffer(roots, array.dtype, array.size, start).reshape(array.shape)
            start += array.nbytes
            if new.tobytes() != array.tobytes():
                variable._value = _on_the_devices_of(variable.value, new)

    def assign_copies(self, variables: Sequence[Variable], arrays: Sequence[np.ndarray]) -> None:
        if jax.process_count() == 1:
            super().assign_copies(variables, arrays)
            return
        for variable, array in zip(variables, arrays):  # `assign` would ask the other processes whether they agree
            variable._value = _on_the_devices_of(variable.value, array.astype(variable.value.dtype))

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_objects(value)


@contextlib.contextmanager
def _under(distribution: Any) -> Iterator[None]:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def _spans_processes(num_replicas: int) -> bool:
    # One axis over the devices of this process alone would have fewer.
    return jax.process_count() > 1 and num_replicas == jax.device_count()


def gather_objects(value: Any) -> list[Any]:
    """What each process gives, whatever it is, in the order of their ids."""
    if jax.process_count() == 1:
        return [value]
    # In a thread of its own, which knows nothing of a trace that is going on in this one.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(_gathered, value).result()


def _gathered(value: Any) -> list[Any]:
    mine = np.frombuffer(pickle.dumps(value), "uint8")
    lengths = np.asarray(multihost_utils.process_allgather(np.array(len(mine), "int32"))).reshape(-1)
    padded = np.zeros(max(lengths), "uint8")
    padded[: len(mine)] = mine
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]


_num_meetings: dict[str, int] = {}


def _meet(purpose: str, seconds: float, advice: str) -> None:
    """Waits until all processes have come; one that leaves because others have not come can come again."""
    client: Any = distributed.global_state.client
    mine, number = jax.process_index(), _num_meetings.get(purpose, 0)
    keys = [f"keras_shardopt/meeting/{purpose}/{number}/{process}" for process in range(jax.process_count())]
    client.key_value_set(keys[mine], "1")
    limit = time.monotonic() + seconds
    missing = [process for process in range(len(keys)) if process != mine]
    while missing:
        milliseconds = max(1, int(1000 * (limit - time.monotonic())))
        try:
            client.blocking_key_value_get(keys[missing[0]], milliseconds)
            missing.pop(0)
        except jax.errors.JaxRuntimeError:  # the time is up
            client.key_value_delete(keys[mine])
            raise RuntimeError(
                f"All processes must {purpose} together. Received: no call on process {missing[0]}, {seconds:g} s "
                f"after the one on process {mine}. {advice}"
            ) from None
    _num_meetings[purpose] = number + 1


class _OverProcesses(keras.distribution.DataParallel):
    """Several processes; says what Keras cannot do there before Keras fails."""

    @property
    def auto_shard_dataset(self) -> bool:
        # The first thing that `predict` asks; later it has taken the weights out of the model.
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "predict" and frame.f_globals.get("__name__") == _KERAS_TRAINER:
                raise RuntimeError(
                    "`predict` cannot run over several processes: Keras would read outputs on devices of other "
                    f"processes. Received: a distribution over {jax.process_count()} processes. Use a copy of the "
                    "model in one process: `weights = model.get_weights()`, close `data_parallel()`, then "
                    "`copy = keras.models.clone_model(model)`, `copy.set_weights(weights)` and `copy.predict(x)`."
                )
            frame = frame.f_back  # type: ignore[assignment]
        return False  # each process feeds its own rows


_KERAS_TRAINER = "keras.src.backend.jax.trainer"


def _on_the_devices_of(like: Any, array: np.ndarray) -> Any:
    """`array` on each device of this process that has a copy of `like`."""
    copies = [jax.device_put(array, shard.device) for shard in like.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, copies)


@functools.lru_cache(maxsize=8)
def _fingerprints_on(mesh: Any) -> Any:
    """A function from values that are replicated over a mesh to the fingerprints of each device's copies."""

    def on_device(values: list[Any]) -> Any:
        mine = jax.numpy.stack([_fingerprint(value) for value in values])
        return jax.lax.all_gather(mine, mesh.axis_names)

    # In `shard_map`, where each device looks at what it has: elsewhere XLA may take one copy for all.
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)


def _fingerprint(value: Any) -> Any:
    # The sum of h(w_i + i * c) over the 32-bit words w_i, modulo 2**32, where h (the last steps of MurmurHash3) takes
    # no two words to the same one: another word, another sum. A linear h would not do: with it, two floats of
    # opposite sign could change places unseen.
    words = _words(value)
    places = jax.lax.iota("uint32", words.size) * np.uint32(0x9E3779B9)
    mixed = words + places
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return jax.numpy.sum(mixed, dtype="uint32")


def _words(value: Any) -> Any:
    """The bits of an array in unsigned integers of 32 bits, each of a whole element or a part of one."""
    if jax.numpy.iscomplexobj(value):
        value = jax.numpy.stack([value.real, value.imag])
    if value.dtype == bool:
        return value.reshape(-1).astype("uint32")
    bits = {1: "uint8", 2: "uint16"}.get(value.dtype.itemsize, "uint32")
    return jax.lax.bitcast_convert_type(value, bits).reshape(-1).astype("uint32")


class ScopeInScope(keras.StatelessScope):
    """A scope that knows other variables as the scope around it does, and remembers which were assigned inside."""

    def __init__(self, state_mapping: Any) -> None:
        super().__init__(list(state_mapping), collect_losses=True)
        self._outer = get_stateless_scope()
        self.assigned: list[Variable] = []

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        super().add_update(update)
        if not any(variable is update[0] for variable in self.assigned):
            self.assigned.append(update[0])

    def get_current_value(self, variable: Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        return value if value is not None or self._outer is None else self._outer.get_current_value(variable)


_UNNAMED_PMAP_AXIS = "_internal_pmap_axis_name"


def _devices_of(layout: Any) -> list[str]:
    """The devices, as Keras names them, of a distribution, of its layouts, or of a sharding of JAX's own."""
    mesh = getattr(layout, "device_mesh", None) or getattr(layout, "mesh", None)
    devices = [] if mesh is None else mesh.devices.flat
    return [d if isinstance(d, str) else f"{d.platform}:{d.id}" for d in devices]


def batch_size_of(distribution: Any) -> int:
    """Into how many parts the distribution divides a batch."""
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[list(mesh.axis_names).index(distribution.batch_dim_name)])


MADE_HERE = "_keras_shardopt_made_here"


def _num_devices_of(value: Any) -> int:
    """On how many devices an array is; of one that is being traced, what its type says."""
    if isinstance(value, jax.core.Tracer):
        mesh = getattr(getattr(jax.typeof(value), "sharding", None), "mesh", None)
        return max(1, getattr(mesh, "size", 1))
    return len(value.sharding.device_set) if isinstance(value, jax.Array) else 1


def _make_cpu_devices(num_replicas: int | None) -> None:
    # Where the user has decided in `XLA_FLAGS`, JAX refuses to be told twice.
    given = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    before = jax.config.jax_num_cpu_devices
    wanted = before if given or num_replicas is None else num_replicas
    # RuntimeError: JAX runs already, so what it has must do. Whether that is enough is checked by the caller.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", wanted)
        _give_threads(int(given[1]) if given else wanted)


def _give_threads(num_devices: int) -> None:
    """Lets XLA start enough threads for several devices on a few cores; the user's number stands."""
    # XLA's CPU client takes the size of its thread pool from PJRT_NPROC or else NPROC; else it has a thread for every
    # core, and at least one for every device. Who waits in a collective keeps a thread: where all of them wait, the
    # device that they wait for has none left, and after 40 s XLA aborts the process.
    wanted = max(16, 4 * num_devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_devices > 1 and cores < wanted and not {"NPROC", "PJRT_NPROC"} & os.environ.keys():
        os.environ["NPROC"] = str(wanted)
