"""Compiles the training step of a program for a device that this machine does not have.

The step is the function that Keras' trainer passes to `jax.jit`. JAX exports it for the platform. XLA's compiler for
that platform (in `libtpu` or in JAX's CUDA plugin) then compiles it for devices that are only described.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `keras.src.backend.jax.Variable._initialize_with_initializer` - creates the initial value of a variable on
        all devices of its layout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from keras.src.backend.jax import Variable

from keras_shardopt.compile_for import hlo
from keras_shardopt.compile_for.report import Compiled
from keras_shardopt.compile_for.targets import Target
from keras_shardopt.fit.jax.jitted import making_steps

# Let JAX export custom calls of GSPMD (XLA's partitioner), because these calls do not depend on the platform.
_ALLOWED = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
]

_TRAINING_STATE = 4
"""The number of elements in the state of a training step: weights, other variables, optimizer, metrics."""


class FirstStep(BaseException):
    """Ends the program at its first step. It is a BaseException, so `except Exception` does not catch it."""

    def __init__(self, exported: jax.export.Exported, arguments: Any, options: dict[str, Any], lowered: Any) -> None:
        super().__init__()
        self.exported = exported
        self.arguments = arguments
        self.options = options
        self.on_cpu = lowered


def missing_packages(target: Target) -> list[str]:
    """Returns the names of the packages that this target needs and that are not installed."""
    if target.device.platform == "tpu":
        return [] if importlib.util.find_spec("libtpu") else ["libtpu"]
    plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13") if importlib.util.find_spec("jax_plugins") else ()
    if any(map(importlib.util.find_spec, plugins)):
        return []
    return [f"jax-cuda12-plugin=={jax.__version__}", f"jax-cuda12-pjrt=={jax.__version__}"]


def use_cpu_devices(number: int) -> None:
    """Makes JAX have this number of CPU devices. JAX must not have started."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)


def first_step(program: Callable[[], object], target: Target) -> FirstStep | None:
    """Runs the program up to its first step, with the target's number of CPU devices. None if no step runs."""

    def catching(jit: Callable[..., Any]) -> Callable[..., Any]:
        def making(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            jitted = jit(function, **options)

            def call(*arguments: Any) -> Any:
                if not (isinstance(arguments[0], tuple) and len(arguments[0]) == _TRAINING_STATE):
                    return jitted(*arguments)  # a step of evaluation or prediction
                shapes = jax.tree.map(_shape, arguments)
                export = jax.export.export(jitted, platforms=[target.device.platform], disabled_checks=_ALLOWED)
                counts = target.device.platform == "tpu"  # XLA for GPUs does not count FLOPs; XLA for CPUs does
                raise FirstStep(export(*shapes), shapes, options, None if counts else jitted.lower(*shapes))

            return call

        return making

    try:
        with making_steps(catching), _sharing_memory():
            program()
    except FirstStep as step:
        return step
    return None


@contextlib.contextmanager
def _sharing_memory() -> Iterator[None]:
    """In this block, CPU devices share one buffer for the initial value of a variable, to save memory.

    For this, the value becomes a NumPy array, because JAX copies an array of one device to every other device.
    """
    put, initialize = jax.device_put, Variable._initialize_with_initializer

    def put_shared(value: Any, *args: Any, **kwargs: Any) -> Any:
        return put(jax.tree.map(_on_host, value), *args, **kwargs)

    def initialize_shared(variable: Any, initializer: Any) -> None:
        super(Variable, variable)._initialize_with_initializer(initializer)

    jax.device_put, Variable._initialize_with_initializer = put_shared, initialize_shared
    try:
        yield
    finally:
        jax.device_put, Variable._initialize_with_initializer = put, initialize


def _on_host(value: Any) -> Any:
    is_plain = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return np.asarray(value) if is_plain and jax.dtypes.issubdtype(value.dtype, np.generic) else value


def _shape(value: Any) -> Any:
    if not hasattr(value, "shape"):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=getattr(value, "sharding", None))


def compiled(step: FirstStep, target: Target) -> Compiled:
    """Compiles the step for the target's devices."""
    shardings = _shardings(step, target)
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), step.arguments)
    begin = time.perf_counter()
    donated = step.options.get("donate_argnums", ())
    lowered = jax.jit(step.exported.call, in_shardings=shardings, donate_argnums=donated).lower(*plain)
    # Turn off autotuning, because it runs kernels on the device.
    options = {"xla_gpu_autotune_level": "0"} if target.device.platform == "cuda" else {}
    program = lowered.compile(compiler_options={**(step.options.get("compiler_options") or {}), **options})
    seconds = time.perf_counter() - begin
    text = program.as_text() or ""
    memory: Any = program.memory_analysis()
    cost: Any = program.cost_analysis() or {}
    if step.on_cpu is not None:
        cost = {**cost, "flops": (step.on_cpu.compile().cost_analysis() or {}).get("flops", 0.0)}
    state = step.arguments[0]
    return Compiled(
        target=target,
        collectives=hlo.collectives(text, target.num_devices),
        weights=sum(_num_bytes(value) for value in jax.tree.leaves(state[0])),
        arguments=int(memory.argument_size_in_bytes),
        output=int(memory.output_size_in_bytes),
        aliased=int(memory.alias_size_in_bytes),
        temporary=int(memory.temp_size_in_bytes),
        flops=cost["flops"],
        bytes_accessed=cost["bytes accessed"] if cost.get("bytes accessed", -1) > 0 else None,
        seconds=seconds,
        text=text,
    )


def _num_bytes(value: Any) -> int:
    return int(np.prod(value.shape)) * value.dtype.itemsize


def _shardings(step: FirstStep, target: Target) -> Any:
    """Returns the shardings of the step's arguments on the target's devices."""
    devices = _devices(target)
    own = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(step.arguments))
    mesh = next((each.mesh for each in own if isinstance(each, NamedSharding)), None)
    if mesh is None:  # the program uses one device
        if target.num_devices > 1:
            raise ValueError(
                f"The program must use all devices of {target.name}, but its training step uses one. Create and "
                "compile the model within `keras_shardopt.data_parallel()`."
            )
        return SingleDeviceSharding(devices[0])
    mesh = Mesh(np.array(devices).reshape(mesh.devices.shape), mesh.axis_names)
    return jax.tree.unflatten(step.exported.in_tree, step.exported.in_shardings_jax(mesh))[0]


def _devices(target: Target) -> Any:
    if target.device.platform == "tpu":
        found = importlib.util.find_spec("libtpu")
        assert found is not None and found.origin is not None
        os.environ.setdefault("TPU_LIBRARY_PATH", str(pathlib.Path(found.origin).parent / "libtpu.so"))
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not query the cloud for the machine type
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # safe, because no process holds a TPU
        is_one = target.num_devices == 1 and not target.topology.startswith("v4")  # whose chip is two devices
        host = {"chips_per_host_bounds": (1, 1, 1)} if is_one else {}  # by default, hosts have more chips
        try:
            topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **host)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"A TPU target must have the shape of a slice, such as 2x2 or 4x4. Received: {target.name!r}. "
                f"The compiler's error is: {error}"
            ) from error
    else:
        topology = topologies.get_topology_desc(
            "", "cuda", topology=target.topology, target_config=target.device.gpu_config
        )
    return topology.devices
