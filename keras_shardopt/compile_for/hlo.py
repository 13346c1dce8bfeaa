"""Finds the collective operations in the text of a compiled XLA program (HLO): kind, bytes, number of devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")
_SHAPE = re.compile(r"\b(" + "|".join(_BYTES) + r"|f8\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Args:
        kind: HLO's name of the operation, such as "all-reduce".
        dtypes: the dtypes of its tensors.
        num_bytes: bytes of the whole tensor: the input of an all-reduce or reduce-scatter, the output of an all-gather.
        group_size: number of devices that communicate.
        in_branch: whether the instruction is in a branch of a conditional, so not every step runs it.
    """

    kind: str
    dtypes: tuple[str, ...]
    num_bytes: float
    group_size: int
    in_branch: bool

    @property
    def sent_bytes(self) -> float:
        """The bytes that each device sends if the collective runs in a ring."""
        share = (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            return 2 * share * self.num_bytes
        return self.num_bytes if self.kind in ("collective-permute", "collective-broadcast") else share * self.num_bytes


def collectives(text: str, num_devices: int) -> list[Collective]:
    """Returns the collectives in an optimized HLO text. If a collective lists no groups, all devices take part."""
    bodies, entry = _computations(text)
    found: list[Collective] = []
    chains: set[tuple[str, str]] = set()
    for name, in_branch in _reached(bodies, entry):
        for line in bodies[name]:
            match = _INSTRUCTION.match(line)
            kind = match and next((k for k in _KINDS if match[2] in (k, f"{k}-start")), None)
            if not match or kind is None:
                continue
            # The TPU compiler repeats a collective in each fusion that overlaps with it. Count one per chain id.
            chain = re.search(r'chain_id="\d+"', line)
            if chain and (kind, chain[0]) in chains:
                continue
            chains.add((kind, chain[0] if chain else ""))
            shapes = [(dtype, _size(dtype, dims)) for dtype, dims in _SHAPE.findall(match[1])]
            # The shape of an asynchronous start, except an all-reduce's, lists its operands before its results.
            if match[2].endswith("-start") and kind != "all-reduce":
                shapes = shapes[len(shapes) // 2 :]
            size = _group_size(line, num_devices)
            # The TPU compiler represents a reduce-scatter as a fusion of this name, around an all-reduce.
            fused = kind == "all-reduce" and "all-reduce-scatter" in name
            total = sum(num_bytes for _, num_bytes in shapes) * (size if kind == "reduce-scatter" else 1)
            kind = "reduce-scatter" if fused else kind
            found.append(Collective(kind, tuple(sorted({d for d, _ in shapes})), total, size, in_branch))
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            words = line.replace("ENTRY ", "").split()
            name = words[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _reached(bodies: dict[str, list[str]], entry: str) -> Iterator[tuple[str, bool]]:
    """Yields the name of each computation (function) that the program calls, and whether it runs only in a branch."""
    seen: set[tuple[str, bool]] = set()
    waiting = [(entry, False)]
    while waiting:
        name, in_branch = waiting.pop()
        if (name, in_branch) in seen or name not in bodies:
            continue
        seen.add((name, in_branch))
        yield name, in_branch
        for line in bodies[name]:
            branches = [b.strip().lstrip("%") for m in _BRANCHES.findall(line) for b in m.split(",")]
            inside = in_branch or " conditional(" in line
            waiting += [(called, inside) for called in [*_CALLED.findall(line), *branches]]


def _size(dtype: str, dims: str) -> float:
    return math.prod(int(d) for d in dims.split(",") if d) * _BYTES.get(dtype, 1)


def _group_size(line: str, num_devices: int) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    return num_devices
