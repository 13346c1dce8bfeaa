"""Replicas of JAX programs: mapped axes (`shard_map`, `pmap`) and GSPMD under a `keras.distribution`.

Private names of Keras touched here (a test holds each of them):
    `Variable._layout`, `Variable._value` - the sharding of a variable and the array that has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_shardopt._typing import Gradients, Groups, ReduceOp, Tensor, Variable
from keras_shardopt.replica.base import AllReplicasAtOnce, Arrival, Framework, ReplicaBackend, SingleReplica, World


class MappedAxis(ReplicaBackend):
    """The replicas along a named axis of the `shard_map` or `pmap` that is being traced."""

    def __init__(self, axis_name: str) -> None:
        self._axis = axis_name
        self.num_replicas = jax.lax.axis_size(axis_name)
        self.is_chief = jax.process_index() == 0

    @property
    def replica_id(self) -> Any:
        return jax.lax.axis_index(self._axis)

    def arrival(self, grads: Gradients, variables: Sequence[Variable]) -> Arrival:
        # shard_map(check_vma=True) knows which values vary along the axis, and sums the gradients of a weight
        # that does not. Elsewhere nothing is known to vary, not even the index along the axis.
        if not self._varies(self.replica_id):
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

    def _varies(self, value: Any) -> bool:
        aval: Any = jax.typeof(value)
        if hasattr(aval, "vma"):  # until JAX 0.9
            return self._axis in aval.vma
        return self._axis in aval.mat.varying

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        if not tensors:
            return []
        reduce = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}[op]
        return list(reduce(list(tensors), self._axis, axis_index_groups=groups))

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        size = self.num_replicas if groups is None else len(groups[0])
        scattered = [jax.lax.psum_scatter(t, self._axis, axis_index_groups=groups, tiled=True) for t in tensors]
        return [t / size for t in scattered] if op == "mean" else scattered

    def all_gather(self, tensors: Sequence[Tensor], groups: Groups | None = None) -> list[Tensor]:
        return [jax.lax.all_gather(t, self._axis, axis_index_groups=groups, tiled=True) for t in tensors]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        from_root = self.replica_id == root
        chosen = [jax.numpy.where(from_root, t, jax.numpy.zeros_like(t)) for t in tensors]
        return list(jax.lax.psum(chosen, self._axis))


class Jax(Framework):
    """JAX: replicas are devices of one program, in one process or several."""

    updates_are_stateless = True
    outlives_its_block = True

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
        num_replicas = _batch_size(keras.distribution.distribution())
        if num_replicas == 1:
            return SingleReplica()
        # GSPMD: one program over the whole batch, which XLA divides among the devices.
        return AllReplicasAtOnce(num_replicas, jax.process_index() == 0, "under a `keras.distribution`")

    def check_ready(self, variables: Sequence[Variable], optimizers: Sequence[Any]) -> None:
        distribution = keras.distribution.distribution()
        active = [] if _batch_size(distribution) == 1 else _devices_of(distribution)
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

    def gradient_of(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        return jax.grad(function)(value)

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

    @contextlib.contextmanager
    def world(self, num_replicas: int | None) -> Iterator[World]:
        if num_replicas is not None:
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
        num_processes, process_id = jax.process_count(), jax.process_index()
        before = keras.distribution.distribution()
        distribution = None
        if len(devices) > 1:
            # Each process feeds its own rows, on every backend alike, so Keras must not divide them once more.
            distribution = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
        keras.distribution.set_distribution(distribution)
        try:
            yield World(
                num_replicas=len(devices),
                replica_id=process_id * (len(devices) // num_processes),
                is_chief=process_id == 0,
                num_processes=num_processes,
                process_id=process_id,
            )
        finally:
            if keras.distribution.distribution() is distribution:
                keras.distribution.set_distribution(before)

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


_UNNAMED_PMAP_AXIS = "_internal_pmap_axis_name"


def _devices_of(layout: Any) -> list[str]:
    """The devices, as Keras names them, of a distribution, of its layouts, or of a sharding of JAX's own."""
    mesh = getattr(layout, "device_mesh", None) or getattr(layout, "mesh", None)
    devices = [] if mesh is None else mesh.devices.flat
    return [d if isinstance(d, str) else f"{d.platform}:{d.id}" for d in devices]


def _batch_size(distribution: Any) -> int:
    """Into how many parts the distribution divides a batch."""
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[list(mesh.axis_names).index(distribution.batch_dim_name)])


def _make_cpu_devices(num_replicas: int) -> None:
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has decided; JAX refuses to be told twice
    # RuntimeError: JAX runs already, so what it has must do. Whether that is enough is checked by the caller.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_replicas)
