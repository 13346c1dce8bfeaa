"""The report of a compiled step: memory, collectives, and lower bounds of its time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from keras_shardopt.compile_for.hlo import Collective
from keras_shardopt.compile_for.targets import Target


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled for a target. Bytes and FLOPs are per device."""

    target: Target
    collectives: list[Collective]
    weights: int
    """Bytes of all trainable weights, not divided among devices."""
    arguments: int
    output: int
    aliased: int
    """Bytes of outputs that are written to the memory of arguments."""
    temporary: int
    flops: float
    bytes_accessed: float | None
    """Bytes that the step reads and writes in device memory. None if the compiler does not report them."""
    seconds: float
    """Seconds that the compilation took."""
    text: str
    """The text of the optimized program (HLO)."""

    @property
    def peak(self) -> int:
        """Bytes of device memory that the step needs."""
        return self.arguments + self.output - self.aliased + self.temporary

    @property
    def sent(self) -> float:
        """The bytes that each device sends in a step if collectives run in a ring."""
        return sum(collective.sent_bytes for collective in self.collectives)

    @property
    def bounds(self) -> dict[str, float]:
        """The least seconds that a step can take, by the resource that limits it: compute, memory, communication."""
        device = self.target.device
        return {
            "compute": self.flops / device.flops,
            "memory": (self.arguments + self.output) / device.memory_bandwidth,
            "communication": self.sent / self.target.bandwidth,
        }

    def predicted(self, kind: str) -> float:
        """Seconds of communication for a "ring" or a "tree" algorithm, by the alpha-beta model.

        With N devices, latency a, bandwidth B and S bytes, an all-reduce takes 2(N-1)a + 2(N-1)/N * S/B in a ring and
        2*log2(N)*a + 2*S/B in a tree. Other collectives take half. (Thakur, Rabenseifner, Gropp, "Optimization of
        Collective Communication Operations in MPICH", 2005, sections 4.1 to 4.5.)
        """
        latency, bandwidth = self.target.device.latency, self.target.bandwidth
        total = 0.0
        for each in self.collectives:
            passes = 2 if each.kind == "all-reduce" else 1
            if kind == "ring":
                total += passes * (each.group_size - 1) * latency + each.sent_bytes / bandwidth
            else:
                total += passes * (math.ceil(math.log2(max(each.group_size, 1))) * latency + each.num_bytes / bandwidth)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures as a JSON-serializable dict."""
        return {
            "target": self.target.name,
            "num_devices": self.target.num_devices,
            "weights_bytes": self.weights,
            "memory_bytes": {
                "arguments": self.arguments,
                "output": self.output,
                "aliased": self.aliased,
                "temporary": self.temporary,
                "peak": self.peak,
                "device": self.target.device.memory,
            },
            "collectives": [dataclasses.asdict(each) for each in self.collectives],
            "sent_bytes": self.sent,
            "flops": self.flops,
            "bytes_accessed": self.bytes_accessed,
            "bounds_seconds": self.bounds,
            "predicted_seconds": {kind: self.predicted(kind) for kind in ("ring", "tree")},
            "compile_seconds": self.seconds,
        }


def table(compiled: Compiled) -> str:
    """Returns the report as text."""
    memory = compiled.target.device.memory
    bounds = compiled.bounds
    slowest = max(bounds, key=lambda name: bounds[name])
    lines = [
        f"compiled for {compiled.target.name} ({compiled.target.num_devices} devices) in {compiled.seconds:.1f} s; "
        "not run",
        "",
        f"memory of one device   {_mb(compiled.peak)} of {memory / 1e9:.0f} GB ({compiled.peak / memory:.2%})",
        f"  arguments            {_mb(compiled.arguments)}",
        f"  temporary            {_mb(compiled.temporary)}",
        f"  output               {_mb(compiled.output)}, {_mb(compiled.aliased)} of it in the memory of arguments",
        "",
        "collectives            number x bytes each; in a branch: run only if a condition holds",
        *_rows(compiled.collectives),
        f"sent by one device     {_mb(compiled.sent)}",
        "",
        f"FLOPs                  {compiled.flops:.3g}",
        f"bytes accessed         {'unknown' if compiled.bytes_accessed is None else _mb(compiled.bytes_accessed)}",
        "",
        "minimum time of a step",
        *(
            f"  {name:20} {seconds * 1e6:10.1f} us{'   <- slowest' if name == slowest else ''}"
            for name, seconds in bounds.items()
        ),
    ]
    return "\n".join(lines)


def _rows(collectives: Sequence[Collective]) -> list[str]:
    counts: dict[tuple[str, float, tuple[str, ...], bool], int] = {}
    for each in collectives:
        key = (each.kind, each.num_bytes, each.dtypes, each.in_branch)
        counts[key] = counts.get(key, 0) + 1
    return [
        f"  {kind:20} {number:6} x {_mb(size):12} in a branch: {'yes' if in_branch else 'no':3}  {' '.join(dtypes)}"
        for (kind, size, dtypes, in_branch), number in counts.items()
    ] or ["  none"]


def scale_table(everything: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a row per target, from the results of `Compiled.as_dict`."""
    head = ("target", "devices", "collectives", "sent MB", "compute us", "ring us", "tree us", "ring / compute")
    rows = [head]
    for each in everything:
        compute, ring = each["bounds_seconds"]["compute"], each["predicted_seconds"]["ring"]
        times = [compute, ring, each["predicted_seconds"]["tree"]]
        rows.append(
            (
                each["target"],
                str(each["num_devices"]),
                str(len(each["collectives"])),
                f"{each['sent_bytes'] / 1e6:.3f}",
                *(f"{seconds * 1e6:.1f}" for seconds in times),
                f"{ring / compute if compute else math.inf:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def plot(everything: Sequence[dict[str, Any]], file: str) -> None:
    """Plots times of communication and compute over the number of devices, from the results of `Compiled.as_dict`."""
    from matplotlib.figure import Figure  # imported here, because it is optional and slow to import

    each_row = sorted(everything, key=lambda each: each["num_devices"])
    numbers = [each["num_devices"] for each in each_row]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kind in ("ring", "tree"):
        times = [each["predicted_seconds"][kind] * 1e6 for each in each_row]
        axes.plot(numbers, times, "o-", label=f"communication, {kind}")
    axes.plot(numbers, [each["bounds_seconds"]["compute"] * 1e6 for each in each_row], "k--", label="compute, at peak")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="predicted time of a step, us")
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_title(f"{each_row[0]['target']} to {each_row[-1]['target']}: predicted, not run")
    axes.legend()
    figure.savefig(file)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f} MB"
