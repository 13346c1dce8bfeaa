"""Tracing and control flow on JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from keras_shardopt.backends.communicator import Communicator, GlobalView, SingleReplica
from keras_shardopt.backends.jax.communicator import MappedAxis, divided_along, num_batch_shards, spans_processes
from keras_shardopt.backends.runtime import Runtime
from keras_shardopt.backends.scopes import ScopeInScope, assigning_nothing
from keras_shardopt.numerics import Tensor, Variable


class JaxRuntime(Runtime):
    """Traces and differentiates on JAX. Replicas are devices of one program, in one process or several."""

    updates_are_stateless = True

    def communicator(self, axis_name: str) -> Communicator:
        try:
            jax.lax.axis_size(axis_name)
        except NameError:
            pass
        else:
            return MappedAxis(axis_name)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual == (_UNNAMED_PMAP_AXIS,):
            raise ValueError(
                "`jax.pmap` must have an `axis_name`, or gradients would not be averaged over the replicas. Received: "
                f"`pmap` without a name. Use `jax.pmap(step, axis_name={axis_name!r})`."
            )
        if manual:
            raise ValueError(
                "`axis_name` must be an axis of the `shard_map` or `pmap` around the update, or gradients would not "
                f"be reduced. Received: axis_name={axis_name!r}, with the axes {tuple(manual)}. "
                f"Use `CrossShard(..., axis_name={manual[0]!r})`."
            )
        num_replicas = num_batch_shards(keras.distribution.distribution())
        if num_replicas == 1:
            return SingleReplica()
        # GSPMD: one program computes the whole batch, divided by XLA among the devices.
        return GlobalView(num_replicas, "under a `keras.distribution`", spans_processes(num_replicas))

    def value_and_grad(
        self,
        loss: Callable[[], tuple[Tensor, Any]],
        variables: Sequence[Variable],
        axis_name: str | None,
        before_assign: Callable[[Variable], None] | None = None,
    ) -> tuple[list[Tensor | None], Any]:
        replicas = None if axis_name is None else self.communicator(axis_name)
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
            if before_assign is not None:
                before_assign(variable)
            variable.assign(value)
        return list(found), more

    def cond(
        self,
        condition: Any,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
        communicates: bool = True,
        apart: bool = False,
        mostly: bool = False,
    ) -> None:
        if not isinstance(condition, jax.core.Tracer):
            super().cond(condition, update, grads, variables)
            return
        # Assignments inside a branch would leak tracers into variables, so each branch returns all values instead.
        before = [variable.value for variable in variables]

        def updated() -> list[Tensor]:
            with ScopeInScope(zip(variables, before)) as scope:
                update(grads)
            return [scope.get_current_value(variable) for variable in variables]

        if mostly:
            # Avoid `cond`: its branches cannot update in place, so they need temporary memory as large as `variables`.
            pairs = zip(updated(), before)
            chosen = [new if new is old else jax.numpy.where(condition, new, old) for new, old in pairs]
        else:
            chosen = jax.lax.cond(condition, updated, lambda: before)
        for variable, value in zip(variables, chosen):
            variable.assign(value)

    def map_replicas(self, function: Callable[..., Any], stacked: Any, axes: Sequence[int | None]) -> Any:
        distribution = keras.distribution.distribution()

        def on_one(own: Any) -> Any:
            with assigning_nothing(OWN_GRADIENTS):
                slices, equal, mine = function(jax.tree.map(lambda value: value[0], own))
                return slices, equal, jax.tree.map(lambda value: value[None], mine)

        divided = jax.sharding.PartitionSpec(distribution.batch_dim_name)
        return jax.shard_map(
            on_one,
            mesh=distribution.device_mesh.backend_mesh,
            axis_names={distribution.batch_dim_name},
            in_specs=divided,
            out_specs=(divided_along(axes, distribution.batch_dim_name), jax.sharding.PartitionSpec(), divided),
            check_vma=False,
        )(stacked)

    def is_concrete(self, value: Any) -> bool:
        return not isinstance(value, jax.core.Tracer)

    def raise_if(
        self, condition: Any, nonfinite_source: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        # Never stop a compiled step: it has taken over the memory of the weights, so an error would lose them.
        if self.is_concrete(condition):
            super().raise_if(condition, nonfinite_source, names, rule)


runtime = JaxRuntime()


OWN_GRADIENTS = "`Stage.local` or `replica_transform` of a `CrossShard`"
"""The name, in error messages, of the code that runs on each replica's own gradients."""

_UNNAMED_PMAP_AXIS = "_internal_pmap_axis_name"
