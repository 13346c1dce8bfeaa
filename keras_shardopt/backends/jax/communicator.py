"""Replicas on JAX: mapped axes (`shard_map`, `pmap`), and GSPMD under a `keras.distribution`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, path_of


class MappedAxis(Communicator):
    """The replicas along a named axis of the `shard_map` or `pmap` being traced."""

    def __init__(self, axis_name: str) -> None:
        self._axis = axis_name
        self.num_replicas = jax.lax.axis_size(axis_name)
        self.is_multi_process = spans_processes(self.num_replicas)

    @property
    def replica_id(self) -> Any:
        return jax.lax.axis_index(self._axis) if self._groups is None else self._at_own_id(self._positions_by_id)

    def _at_own_id(self, values: list[Any]) -> Any:
        return jax.numpy.array(values)[self.world.replica_id]

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        # shard_map(check_vma=True) tracks which values vary along the axis. It sums the gradients of weights that do
        # not vary. Without that option, JAX reports no value as varying, not even the axis index.
        if not self._tracks_varying:
            return GradientState.LOCAL
        varying = [self._varies(grad) for grad in grads if grad is not None]
        if all(varying):
            return GradientState.LOCAL
        if not any(varying):
            return GradientState.SUMMED
        names = [path_of(v) for g, v in zip(grads, variables) if g is not None and self._varies(g)]
        raise ValueError(
            "Gradients must all be local (weights cast to varying), or all be summed by `shard_map`. "
            f"Received: local gradients for {names} only. "
            f"Use `jax.lax.pcast(w, {self._axis!r}, to='varying')` on all weights or on none."
        )

    @property
    def _tracks_varying(self) -> bool:
        return self._varies(jax.lax.axis_index(self._axis))

    def varying(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Cast values to "varying", that is, different on each replica. JAX then does not sum their gradients."""
        if not self._tracks_varying:
            return list(values)
        return [v if self._varies(v) else jax.lax.pcast(v, (self._axis,), to="varying") for v in values]

    def _varies(self, value: Any) -> bool:
        aval: Any = jax.typeof(value)
        if hasattr(aval, "vma"):  # until JAX 0.9
            return self._axis in aval.vma
        return self._axis in aval.mat.varying

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        if not tensors:
            return []
        if self._groups is not None and op != "max" and self._tracks_varying:
            # Gather and add, because shard_map(check_vma=True) has no sum within groups, up to JAX 0.10 at least.
            note("all_gather", tensors, self.world.num_replicas)
            over_members, members = {"sum": jax.numpy.sum, "mean": jax.numpy.mean}[op], self.members
            return [over_members(jax.lax.all_gather(t, self._axis)[members], axis=0) for t in tensors]
        note("all_reduce", tensors, self.num_replicas)
        reduce = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}[op]
        return list(reduce(list(tensors), self._axis, axis_index_groups=self._groups))

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        note("reduce_scatter", tensors, self.num_replicas)
        scattered = [jax.lax.psum_scatter(t, self._axis, axis_index_groups=self._groups, tiled=True) for t in tensors]
        return [t / self.num_replicas for t in scattered] if op == "mean" else scattered

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        note("all_to_all", tensors, self.num_replicas)
        how = {"split_axis": 0, "concat_axis": 0, "axis_index_groups": self._groups, "tiled": True}
        return [_as_bits(lambda bits: jax.lax.all_to_all(bits, self._axis, **how), t) for t in tensors]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        note("all_gather", tensors, self.num_replicas)
        how = {"axis_index_groups": self._groups, "tiled": True}
        return [_as_bits(lambda bits: jax.lax.all_gather(bits, self._axis, **how), t) for t in tensors]


def _as_bits(move: Callable[[Any], Any], tensor: Tensor) -> Tensor:
    """Send a tensor with the collective `move`: half precision as uint16, because XLA on CPUs would send float32."""
    if tensor.dtype not in ("float16", "bfloat16"):
        return move(tensor)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(tensor, "uint16")), tensor.dtype)


def seed_offset(replica_id: Tensor) -> Tensor:
    """Return the number to add to a replica's seed states, so replicas draw different dropout masks."""
    return jax.numpy.array([1, 0], "uint32") * replica_id.astype("uint32") * np.uint32(0x9E3779B1)


def spans_processes(num_replicas: int) -> bool:
    """Return whether the replicas span several processes: in a job of several, if they are as many as all devices."""
    return jax.process_count() > 1 and num_replicas == jax.device_count()


def divided_along(axes: Sequence[int | None], name: str) -> list[Any]:
    """Return a `PartitionSpec` per array that divides dimension `axes[i]` of array `i` along the mesh axis `name`."""
    spec = jax.sharding.PartitionSpec
    return [spec() if axis is None else spec(*[None] * axis, name) for axis in axes]


def num_batch_shards(distribution: Any) -> int:
    """Return into how many parts this distribution divides a batch."""
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[list(mesh.axis_names).index(distribution.batch_dim_name)])
