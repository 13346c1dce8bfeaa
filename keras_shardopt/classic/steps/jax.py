"""Training steps on JAX: a jitted function of the values of all variables that the step reads or assigns.

A step can use variables that its caller did not list, such as a seed, or a frozen weight in the loss. In a trace, such
variables become constants. Therefore a first trace collects these variables. A second trace has them as arguments.

Private names of Keras touched here (a test checks that each exists):
    `Variable._value` - the array of a variable.
    `StatelessScope.add_update`, `get_current_value` - called by variables to write to a scope and read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_shardopt.backends.active import placement
from keras_shardopt.backends.jax.communicator import num_batch_shards
from keras_shardopt.numerics import Tensor, Variable


def compile_step(
    function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
) -> Callable[..., Tensor]:
    """Compile a training step for all replicas."""
    if jit_compile is False:
        return lambda *batch, **constants: function(*jax.tree.map(_on_devices, batch), **constants)
    return _Program(function, variables)


class _Program:
    def __init__(self, function: Callable[..., Tensor], variables: Sequence[Variable]) -> None:
        self._function = function
        self._variables = list(variables)
        self._jitted: dict[Any, Any] = {}

    def __call__(self, *batch: Any, **constants: Any) -> Tensor:
        batch = jax.tree.map(_on_devices, batch)
        while True:
            program = self._program(constants)
            try:
                result, values = program(_distinct([v.value for v in self._variables]), batch)
                break
            except _UnknownVariables as unknown:
                placement.place(unknown.variables, "replicated")
                self._variables += unknown.variables
                self._jitted.clear()
        for variable, value in zip(self._variables, values):
            variable._value = value
        return result

    def _program(self, constants: dict[str, Any]) -> Any:
        key = tuple(sorted(constants.items()))
        if key not in self._jitted:
            variables = list(self._variables)

            def pure(values: list[Tensor], batch: Any) -> tuple[Tensor, list[Tensor]]:
                with _CollectingScope(list(zip(variables, values))) as scope:
                    result = self._function(*batch, **constants)
                if scope.unknown:
                    raise _UnknownVariables(scope.unknown)
                return result, [scope.get_current_value(variable) for variable in variables]

            # Keep the shardings of variables. If the compiler chose other shardings, the next call would compile again.
            placed = [variable.value.sharding for variable in variables]
            options = {} if keras.distribution.distribution() is None else {"out_shardings": (None, placed)}
            self._jitted[key] = jax.jit(pure, donate_argnums=0, **options)
        return self._jitted[key]


class _UnknownVariables(Exception):
    def __init__(self, variables: list[Variable]) -> None:
        super().__init__()
        self.variables = variables


class _CollectingScope(keras.StatelessScope):
    """A Keras scope that collects in `unknown` the variables that a step uses, but `state_mapping` lacks."""

    def __init__(self, state_mapping: list[tuple[Variable, Tensor]]) -> None:
        super().__init__(state_mapping, collect_losses=True)
        self._known = {id(variable) for variable, _ in state_mapping}
        self.unknown: list[Variable] = []

    def _collect(self, variable: Variable) -> None:
        if id(variable) not in self._known:
            self._known.add(id(variable))
            self.unknown.append(variable)

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        self._collect(update[0])
        super().add_update(update)

    def get_current_value(self, variable: Variable) -> Tensor | None:
        self._collect(variable)
        return super().get_current_value(variable)


def _distinct(values: list[Tensor]) -> list[Tensor]:
    """Copy arrays that several variables share, because a step can take (donate) the buffer of an array only once."""
    if len({id(value) for value in values}) == len(values):
        return values
    seen: set[int] = set()
    copies = []
    for value in values:
        copies.append(jax.numpy.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return copies


def _on_devices(value: Any) -> Tensor:
    """Split a batch's rows among the devices of the distribution."""
    distribution = keras.distribution.distribution()
    num_replicas = num_batch_shards(distribution)
    if num_replicas == 1:
        return jax.numpy.asarray(value)
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not value.ndim or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.numpy.asarray(value)  # a scalar, or already divided among devices
    num_local = num_replicas // jax.process_count()
    if value.shape[0] % num_local:
        raise ValueError(
            "The number of rows must be divisible by the number of replicas. "
            f"Received: a batch of shape {tuple(value.shape)}, for {num_local} replicas. Drop the last rows."
        )
    rows = NamedSharding(distribution.device_mesh.backend_mesh, PartitionSpec(distribution.batch_dim_name))
    if jax.process_count() == 1:
        return jax.device_put(value, rows)
    return jax.make_array_from_process_local_data(rows, np.asarray(value))
