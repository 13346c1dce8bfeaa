"""Devices that a step can be compiled for, with their published figures.

The figures were read on 2026-11-25:
    TPU: https://docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /v4 ("Peak compute per chip (bf16)", "HBM capacity",
        "HBM bandwidth", and half of "Bidirectional inter-chip interconnect bandwidth").
    GPU: NVIDIA's data sheets of H100 SXM, H200 and A100 80GB SXM (dense bfloat16, HBM, NVLink in both directions).
        Machines of 8 GPUs have one 400 Gb/s network port per GPU (DGX H100, H200), 200 Gb/s for A100.
The compiler needs a GPU as a `GpuTargetConfigProto` of OpenXLA. The values are from the same data sheets and from
`xla/backends/gpu/target_config/specs` in github.com/openxla/xla.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Device:
    """One TPU chip or GPU."""

    platform: str
    """JAX's name of the platform: "tpu" or "cuda"."""

    flops: float
    """Peak bfloat16 FLOPs per second, for dense matrices."""

    memory: float
    """Bytes of device memory."""

    memory_bandwidth: float
    """Bytes per second that the device reads or writes in its memory."""

    link_bandwidth: float
    """Bytes per second that one device can send to its neighbors."""

    network_bandwidth: float | None = None
    """Bytes per second between machines of 8 GPUs. None if links connect all devices."""

    latency: float = 1e-6
    """Seconds per message, an assumption of the alpha-beta model."""

    gpu_config: str = ""
    """The description of the GPU for XLA's compiler, in protobuf text format."""


_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
  cuda_compute_capability {{ major: {major} }}
  device_vendor: "NVIDIA Corporation" name: "{name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
"""


def _hopper(name: str, memory: float, bandwidth: float) -> Device:
    config = _GPU.format(
        name=name, shared=233472, optin=232448, cores=132, fpus=128, clock=1.98, cache=52428800, major=9,
        bandwidth=int(bandwidth), memory=int(memory),
    )  # fmt: skip
    return Device("cuda", 989.4e12, memory, bandwidth, 450e9, 50e9, 5e-6, config)


_A100 = _GPU.format(
    name="NVIDIA A100-SXM4-80GB", shared=167936, optin=166912, cores=108, fpus=64, clock=1.41, cache=41943040, major=8,
    bandwidth=2039040000000, memory=85100068864,
)  # fmt: skip

DEVICES = {
    "tpu:v4": Device("tpu", 275e12, 32e9, 1228e9, 300e9),
    "tpu:v5e": Device("tpu", 197e12, 16e9, 819e9, 200e9),
    "tpu:v5p": Device("tpu", 459e12, 95e9, 2765e9, 600e9),
    "tpu:v6e": Device("tpu", 918e12, 32e9, 1638e9, 400e9),
    "a100": Device("cuda", 312e12, 85100068864, 2039.04e9, 300e9, 25e9, 5e-6, _A100),
    "h100": _hopper("NVIDIA H100 80GB HBM3", 84942979072, 3352.32e9),
    "h200": _hopper("NVIDIA H200 141GB HBM3e", 151397597184, 4800e9),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a job runs on.

    Args:
        name: the user's spelling, such as "h100:8" or "tpu:v5e:2x4".
        device: the kind of device.
        topology: on TPU the name of the slice, such as "v5e:2x4"; on GPU "1xMACHINESx8".
        num_devices: number of devices.
    """

    name: str
    device: Device
    topology: str
    num_devices: int

    @property
    def bandwidth(self) -> float:
        """The bytes per second that one device can send in a collective of all devices."""
        slow = self.device.network_bandwidth
        return slow if slow is not None and self.num_devices > 8 else self.device.link_bandwidth


def parse(name: str) -> Target:
    """Returns the target with this name. Raises ValueError if the name is invalid."""
    kind, _, shape = name.rpartition(":")
    device = DEVICES.get(kind)
    sizes = shape.split("x")
    if device is None or not all(size.isdecimal() and int(size) for size in sizes):
        examples = ", ".join(f"{kind}:2x4" if kind.startswith("tpu:") else f"{kind}:8" for kind in DEVICES)
        raise ValueError(f"A target is a device and a number or shape: {examples}. Received: {name!r}.")
    count = math.prod(map(int, sizes))
    if device.platform == "tpu":
        return Target(name, device, f"{kind.removeprefix('tpu:')}:{shape}", count)
    if len(sizes) > 1 or (count > 8 and count % 8):
        raise ValueError(
            f"The number of GPUs must be at most 8 or a multiple of 8, as in {kind}:64. Received: {name!r}."
        )
    return Target(name, device, f"1x{max(1, count // 8)}x{min(count, 8)}", count)
