"""Variables on JAX: arrays laid out over the devices of a mesh.

Private names of Keras touched here (a test checks that each exists):
    `Variable._layout`, `Variable._value` - the sharding of a variable, and its array.
    `Variable._shape`, `Variable._ndim` - the shape of a variable, and its number of dimensions.
    `Variable._direct_assign` - assigns an array; under a distribution it communicates with all processes.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.jax.communicator import num_batch_shards
from keras_shardopt.backends.jax.processes import processes
from keras_shardopt.backends.placement import Layout, Placement
from keras_shardopt.numerics import Optimizer, Tensor, Variable

Axes = list[tuple[str, ...]]
"""For each dimension of an array, the mesh axes that divide it."""


def with_free_axes(shape: Sequence[int], axes: Axes, mesh: Mapping[str, int]) -> Axes:
    """Return `axes`, extended by unused axes of the mesh, to divide an array into as many parts as possible.

    Args:
        shape: the shape of the array.
        axes: the axes of the mesh that divide each dimension of the array in the model.
        mesh: the size of each axis of the mesh.
    """
    used = [name for names in axes for name in names]
    free = [name for name, size in mesh.items() if size > 1 and name not in used]
    found = []
    for chosen in itertools.product([*range(len(shape)), None], repeat=len(free)):
        divided = [names + tuple(n for n, d in zip(free, chosen) if d == i) for i, names in enumerate(axes)]
        parts = [math.prod(mesh[name] for name in names) for names in divided]
        dimensions = sorted({d for d in chosen if d is not None})
        if all(shape[d] and shape[d] % parts[d] == 0 for d in dimensions):
            # Prefer layouts with many parts, then few changed dimensions, then undivided ones, then early ones.
            already = sum(bool(axes[d]) for d in dimensions)
            found.append((-math.prod(parts), len(dimensions), already, dimensions, divided))
    return min(found)[-1]


class JaxPlacement(Placement):
    """Places variables on JAX. Replicas are devices of one program, in one process or several."""

    state_sharding = "layout"

    def __init__(self) -> None:
        # While `outside_strategy` runs, the distribution that it has suspended. Otherwise None.
        self._suspended: Any = None

    def before_build(
        self, variables: Sequence[Variable], optimizer: Optimizer, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        if shards_state:
            _check_can_lay_out(variables)

    def check(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Any],
        is_loaded: bool = False,
        shards_state: bool = False,
    ) -> None:
        distribution = keras.distribution.distribution()
        if distribution is None and processes._opened is not None and jax.process_count() > 1:
            raise ValueError(
                "The distribution of `data_parallel()` must stay active, or each process would train a separate model. "
                "Received: no active distribution. `keras.backend.clear_session()` removes the distribution, so call "
                "`clear_session` before `data_parallel()`."
            )
        active = _devices_of(distribution)
        # With only one device, no variable can be on the wrong device, so skip the check.
        active = active if len(active) > 1 else []
        for variable in variables:
            theirs = _devices_of(variable._layout)
            if len(theirs) > 1 and not active:
                raise ValueError(
                    f"`{variable.path}` was made for {len(theirs)} devices, but no distribution is active, so each "
                    "device would repeat the whole computation. Train before `data_parallel()` is closed, or build a "
                    "new model outside `data_parallel()`."
                )
            if active and theirs != active:
                made = f"for {len(theirs)} other devices than" if theirs else "before"
                raise ValueError(
                    f"`{variable.path}` must be on all devices of the active distribution. Received: a variable made "
                    f"{made} the active distribution, which has {len(active)} devices. Build the model inside `with "
                    "keras_shardopt.data_parallel():`, or after `set_distribution`."
                )
        # Skip this check inside `shard_map` and `pmap`, which have no layouts. The caller raises an error there.
        if shards_state and not jax.sharding.get_abstract_mesh().manual_axes:
            _check_can_lay_out(variables)

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        distribution = keras.distribution.distribution()
        if num_batch_shards(distribution) == 1:
            return super().dividing_axes(variables)
        name = distribution.batch_dim_name
        layouts = [_state_axes(variable, distribution) for variable in variables]
        return [next((i for i, names in enumerate(axes) if name in names), None) for axes in layouts]

    def place(self, variables: Sequence[Variable], how: Layout) -> str | None:
        distribution = keras.distribution.distribution()
        if distribution is None or (how == "per_replica" and num_batch_shards(distribution) == 1):
            return None
        _PLACE[how](variables, distribution)
        axis_name: str | None = distribution.batch_dim_name
        return axis_name

    def replica_values(self, variable: Variable) -> list[np.ndarray]:
        value = variable.value
        shards = local_shards(value)
        if _STACKED in vars(variable):
            rows = {shard.index[0].start or 0: np.empty(value.shape[1:], value.dtype) for shard in shards}
            for shard in shards:
                rows[shard.index[0].start or 0][shard.index[1:]] = shard.data[0]
            return [row for _, row in sorted(rows.items())]
        return [np.asarray(shard.data) for shard in (shards if value.sharding.is_fully_replicated else shards[:1])]

    def assign_replica_values(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        if _STACKED in vars(variable):
            like = variable.value
            places = sorted({shard.index[0].start or 0 for shard in like.addressable_shards})
            rows = dict(zip(places, arrays, strict=True))
            parts = [
                jax.device_put(rows[shard.index[0].start or 0][(None, *shard.index[1:])], shard.device)
                for shard in like.addressable_shards
            ]
            variable._value = jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)
            return
        if jax.process_count() == 1:
            super().assign_replica_values(variable, arrays)
            return
        (array,) = arrays  # set `_value`, because `assign` would compare the value on all processes
        variable._value = _on_the_devices_of(variable.value, array.astype(variable.value.dtype))

    def bytes_held(self, variables: Sequence[Variable]) -> int:
        held: collections.Counter[Any] = collections.Counter()
        for shard in (shard for variable in variables for shard in local_shards(variable.value)):
            held[shard.device] += shard.data.nbytes
        return max(held.values(), default=0)

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        values = [variable.value for variable in variables]
        copied = [i for i, value in enumerate(values) if value.sharding.is_fully_replicated]
        meshes = [getattr(values[i].sharding, "mesh", None) for i in copied]
        if not meshes or meshes[0] is None or any(mesh != meshes[0] for mesh in meshes):
            return np.zeros((1, len(values)), "uint64")  # there are no copies, or copies on different meshes
        mesh = meshes[0]
        found = _fingerprints_on(mesh)([values[i] for i in copied])
        rows = np.zeros((mesh.size, len(values)), "uint64")
        rows[:, copied] = np.asarray(found.addressable_data(0))
        return rows

    def outside_strategy(self, function: Callable[[], Any]) -> Any:
        distribution = keras.distribution.distribution()
        if distribution is None:
            return function()
        # Suspend the distribution, because creating a variable under it would involve all devices and processes.
        self._suspended = distribution
        try:
            with _under(None):
                return function()
        finally:
            self._suspended = None

    def colocate_with(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._suspended is None else _under(self._suspended)

    def broadcast_state(
        self,
        variables: Sequence[Variable],
        optimizer_variables: Sequence[Variable],
        replicas: Communicator | None = None,
    ) -> float:
        if jax.process_count() == 1:
            return 1.0
        for what, mine in (("model variables", variables), ("optimizer variables", optimizer_variables)):
            gathered = processes.gather_objects([(tuple(v.shape), str(v.dtype)) for v in mine])
            for process, theirs in enumerate(gathered):
                if theirs != gathered[0]:
                    raise ValueError(
                        f"All processes must have the same {what}. Received on process 0: {gathered[0]}, "
                        f"on process {process}: {theirs}. Build the same model and optimizer in every process."
                    )
        copied = [v for v in [*variables, *optimizer_variables] if v.value.sharding.is_fully_replicated]
        # Broadcast bytes, because JAX broadcasts with a sum, and that would turn -0 into 0.
        arrays = [np.asarray(v.value.addressable_data(0)) for v in copied]
        flat = np.concatenate([np.frombuffer(array.tobytes(), "uint8") for array in arrays])
        roots = np.asarray(multihost_utils.broadcast_one_to_all(flat)).astype("uint8").tobytes()
        start = 0
        for variable, array in zip(copied, arrays):
            new = np.frombuffer(roots, array.dtype, array.size, start).reshape(array.shape)
            start += array.nbytes
            if new.tobytes() != array.tobytes():
                variable._value = _on_the_devices_of(variable.value, new)
        return 1.0


placement = JaxPlacement()


def shard_counts(variables: Sequence[Variable]) -> tuple[list[int], int]:
    """Return the number of shards of each variable after `place(variables, "sharded")`, and the number of devices."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return [1 for _ in variables], 1
    mesh = _mesh_of(distribution)
    parts = [math.prod(mesh[name] for name in sum(_state_axes(v, distribution), ())) for v in variables]
    return parts, math.prod(mesh.values())


def by_rows(tensor: Tensor, is_divided: bool) -> Tensor:
    """Place a tensor on all devices: with `is_divided`, a slice of its rows on each device, otherwise all rows."""
    distribution = keras.distribution.distribution()
    if distribution is None or jax.sharding.get_abstract_mesh().manual_axes:
        return tensor
    names = tuple(_mesh_of(distribution)) if is_divided else ()
    return keras.distribution.distribute_tensor(tensor, _sharding([names], distribution))


def layout_of(variable: Variable) -> Any:
    """Return the `layout` argument that gives a new variable the layout of this variable."""
    return variable._layout


def allow_local_assignment(variables: Sequence[Variable]) -> None:
    """Allow each process to assign these variables independently. The caller must check that all values are equal.

    Without this call, JAX compares an assigned value on all processes. An assignment on one process would hang or fail.
    """
    _replace_direct_assign()
    for variable in variables:
        object.__setattr__(variable, _IS_COMPARED, True)


@contextlib.contextmanager
def local_assignments() -> Iterator[None]:
    """Allow each process to assign existing variables in this block independently, such as values from a file."""
    _replace_direct_assign()
    token = _assigns_alone.set(True)
    try:
        yield
    finally:
        _assigns_alone.reset(token)


def _replace_direct_assign() -> None:
    if keras.Variable._direct_assign is _direct_assign_in_keras:
        keras.Variable._direct_assign = _direct_assign


_assigns_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("assigns_alone", default=False)
_IS_COMPARED = "_keras_shardopt_is_compared"
_direct_assign_in_keras = keras.Variable._direct_assign


def _direct_assign(variable: Variable, value: Any) -> None:
    """Replaces Keras' method of that name. Inside `local_assignments`, it does not communicate."""
    is_alone = _IS_COMPARED in vars(variable) or _assigns_alone.get()
    before: Any = getattr(variable, "_value", None) if is_alone else None
    spans_processes = isinstance(before, jax.Array) and not before.is_fully_addressable
    is_here = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if spans_processes and is_here and before.sharding.is_fully_replicated:
        variable._value = _on_the_devices_of(before, np.asarray(value).astype(before.dtype))
    else:
        _direct_assign_in_keras(variable, value)


def _check_can_lay_out(variables: Sequence[Variable]) -> None:
    if keras.distribution.distribution() is not None:
        return
    for variable in variables:
        num_devices = _num_devices_of(variable.value)
        if num_devices > 1:
            raise ValueError(
                "`shard_state=True` shards state over the devices of the active `keras.distribution`, but no "
                f"distribution is active. Received: `{variable.path}` on {num_devices} devices. Build model and "
                "optimizer inside `with keras_shardopt.data_parallel():`, or after "
                "`keras.distribution.set_distribution(keras.distribution.DataParallel())`; or use `shard_state=False`."
            )


def _replicate(variables: Sequence[Variable], distribution: Any) -> None:
    for variable in variables:
        # Lay out variables that were created on one device, before `set_distribution`. A jitted step could not combine
        # them with weights on all devices.
        if variable._layout is None:
            variable._layout = distribution.get_variable_layout(variable)
            variable._value = keras.distribution.distribute_tensor(variable._value, variable._layout)


def _shard(variables: Sequence[Variable], distribution: Any) -> None:
    for variable in variables:
        variable._layout = _sharding(_state_axes(variable, distribution), distribution)
        variable._value = keras.distribution.distribute_tensor(variable._value, variable._layout)


def _axes_of(variable: Variable) -> Axes:
    """Return the mesh axes that divide each dimension of a variable."""
    layout = variable._layout
    axes: list[Any] = list(getattr(layout, "axes", None) or getattr(layout, "spec", None) or ())
    axes += [None] * (len(variable.shape) - len(axes))
    return [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in axes]


def _state_axes(variable: Variable, distribution: Any) -> Axes:
    """Return the mesh axes that divide each dimension of a variable's optimizer state. Uses all axes if possible."""
    return with_free_axes(variable.shape, _axes_of(variable), _mesh_of(distribution))


def _mesh_of(distribution: Any) -> dict[str, int]:
    """Return the size of each axis of the mesh, beginning with the axis of replicas."""
    mesh = distribution.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    first = distribution.batch_dim_name
    return {first: sizes[first], **sizes}


def _sharding(axes: Axes, distribution: Any) -> jax.sharding.NamedSharding:
    # Use `NamedSharding`, because Keras' `TensorLayout` cannot divide one dimension along two axes of the mesh.
    spec = jax.sharding.PartitionSpec(*[names if len(names) > 1 else next(iter(names), None) for names in axes])
    return jax.sharding.NamedSharding(distribution.device_mesh.backend_mesh, spec)


def _stack(variables: Sequence[Variable], distribution: Any) -> None:
    name = distribution.batch_dim_name
    mesh = _mesh_of(distribution)
    num_replicas = mesh.pop(name)
    for variable in variables:
        row = [tuple(n for n in names if n != name) for names in _axes_of(variable)]
        # With several processes, do not divide a replica's row further: `replica_values` needs whole rows in a process.
        row = with_free_axes(variable.shape, row, mesh) if jax.process_count() == 1 else [() for _ in row]
        variable._layout = _sharding([(name,), *row], distribution)
        zeros = jax.numpy.zeros((num_replicas, *variable.shape), variable.dtype)
        variable._shape, variable._ndim = zeros.shape, zeros.ndim
        setattr(variable, _STACKED, True)
        variable._value = keras.distribution.distribute_tensor(zeros, variable._layout)


_STACKED = "_keras_shardopt_stacked"

_PLACE = {"replicated": _replicate, "sharded": _shard, "per_replica": _stack}


@contextlib.contextmanager
def _under(distribution: Any) -> Iterator[None]:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def local_shards(value: Any) -> Sequence[Any]:
    """Return the shards of an array on the devices of this process."""
    try:
        shards: Sequence[Any] = value.addressable_shards
    except ValueError:
        # Before the first step, a replicated array that Keras has placed on several processes can lack its shards.
        shards = _on_the_devices_of(value, np.asarray(value)).addressable_shards
    return shards


def _on_the_devices_of(like: Any, array: np.ndarray) -> Any:
    """Put `array` on each device of this process that has a copy of `like`."""
    copies = [jax.device_put(array, device) for device in sorted(like.sharding.addressable_devices, key=lambda d: d.id)]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, copies)


@functools.lru_cache(maxsize=8)
def _fingerprints_on(mesh: Any) -> Any:
    """Return a function that hashes each device's copies of replicated values."""

    def on_device(values: list[Any]) -> Any:
        mine = jax.numpy.stack([_fingerprint(value) for value in values])
        return jax.lax.all_gather(mine, mesh.axis_names)

    # Use `shard_map`, because in it each device hashes its own copy. Elsewhere, XLA can use one copy for all devices.
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)


def _fingerprint(value: Any) -> Any:
    # The hash is the sum of h(w_i + i * c) over the 32-bit words w_i, modulo 2**32. h, the last steps of MurmurHash3,
    # is a bijection, so changing one word always changes the sum. If h were linear, swapping two floats of opposite
    # sign could leave the sum unchanged.
    words = _words(value)
    places = jax.lax.iota("uint32", words.size) * np.uint32(0x9E3779B9)
    mixed = words + places
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return jax.numpy.sum(mixed, dtype="uint32")


def _words(value: Any) -> Any:
    """Return the bits of an array as uint32: one number per element, or two per element of 8 bytes."""
    if jax.numpy.iscomplexobj(value):
        value = jax.numpy.stack([value.real, value.imag])
    if value.dtype == bool:
        return value.reshape(-1).astype("uint32")
    bits = {1: "uint8", 2: "uint16"}.get(value.dtype.itemsize, "uint32")
    return jax.lax.bitcast_convert_type(value, bits).reshape(-1).astype("uint32")


def full_value(variable: Variable) -> np.ndarray:
    """Return the whole variable. If processes hold shards, all processes must call this together."""
    value = variable.value
    if value.is_fully_addressable or value.is_fully_replicated:
        return keras.ops.convert_to_numpy(variable)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def bytes_per_device(variable: Variable) -> list[int]:
    """Return the bytes of a variable on each of its devices."""
    sharding = variable.value.sharding
    held = int(np.prod(sharding.shard_shape(variable.value.shape))) * variable.value.dtype.itemsize
    return [held] * len(sharding.device_set)


def _devices_of(layout: Any) -> list[str]:
    """Return Keras' names of the devices of a distribution, a layout, or a JAX sharding."""
    mesh = getattr(layout, "device_mesh", None) or getattr(layout, "mesh", None)
    devices = [] if mesh is None else mesh.devices.flat
    return [d if isinstance(d, str) else f"{d.platform}:{d.id}" for d in devices]


def _num_devices_of(value: Any) -> int:
    """Return the number of devices that hold an array. For a tracer, its type contains this number."""
    if isinstance(value, jax.core.Tracer):
        mesh = getattr(getattr(jax.typeof(value), "sharding", None), "mesh", None)
        return max(1, getattr(mesh, "size", 1))
    return len(value.sharding.device_set) if isinstance(value, jax.Array) else 1
