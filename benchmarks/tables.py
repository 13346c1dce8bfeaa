"""Writes the tables of measurements on the pages under docs/, from the newest results.

    python benchmarks/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end of the table -->`.
"""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import run_all
import timing

DOCS = pathlib.Path(__file__).parents[1] / "docs"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of the table -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {}


def written(function: Callable[[], str]) -> Callable[[], str]:
    TABLES[function.__name__] = function
    return function


def markdown(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """A table. `columns` are names, separated by |."""
    lines = [f"| {columns} |", "|---" * len(columns.split(" | ")) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


@functools.cache
def tables_of(title: str) -> list[list[list[str]]]:
    """The rows of each table of the newest run with this title."""
    runs = {run["title"]: run for run in timing.stored()}  # sorted by date
    return [part["rows"] for part in runs[title]["parts"] if isinstance(part, dict)]


def newest(title: str) -> dict[str, list[str]]:
    """The rows of the newest run with this title, by their first cell."""
    return {row[0]: row for rows in tables_of(title) for row in rows}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (timing.RESULTS / f"{name}.jsonl").read_text().splitlines()]


def middle(cell: str) -> str:
    """The median of "0.94 (0.91 to 0.97)"."""
    return cell.partition(" ")[0]


FIT = "A step of fit on {} replica{} of {}, 4 x Dense(512), 64 rows"
DDP = "A step of fit on 2 ranks of PyTorch, 6 x Dense(1024), 64 rows"
SHARDS = "Divided state on 2 ranks of PyTorch, 6 x Dense(1024), 64 rows"
OURS = "fit, CrossShard(Adam)"
# Replicas, title and row of the result, column of the ratio, peer.
COSTS = [
    ("JAX, 1 replica", FIT.format(1, "", "jax"), "CrossShard(Adam)", 2, "Keras's Adam"),
    ("TensorFlow, 1 replica", FIT.format(1, "", "tensorflow"), "CrossShard(Adam)", 2, "Keras's Adam"),
    ("PyTorch, 1 replica", FIT.format(1, "", "torch"), "CrossShard(Adam)", 2, "Keras's Adam"),
    ("TensorFlow, 2 devices", FIT.format(2, "s", "tensorflow"), "CrossShard(Adam)", 2, "`MirroredStrategy`"),
    ("JAX, 8 devices", FIT.format(8, "s", "jax"), "CrossShard(Adam)", 2, "Keras's `DataParallel`"),
    ("PyTorch, 2 processes", DDP, OURS, 2, "a DDP loop, `torch.optim.Adam`"),
    ("PyTorch, 2 processes", DDP, OURS, 3, "a DDP loop, `Adam(fused=True)`"),
    (
        "PyTorch, 2 processes, `shard_state`",
        SHARDS,
        "fit, CrossShard(Adam, shard_state=True)",
        3,
        "`ZeroRedundancyOptimizer`, fused",
    ),
]


@written
def costs() -> str:
    rows = [(where, newest(title)[row][column], peer) for where, title, row, column, peer in COSTS]
    # Keras's own DDP is a row of its table, and not the base of ratios.
    nightly = newest("A step of fit, next to Keras' own DDP, on 2 ranks of PyTorch, 6 x Dense(1024), 64 rows")
    keras, ours = (float(nightly[name][1]) for name in ("Keras' own DDP with Adam", OURS))
    table = [(where, middle(cell), peer) for where, cell, peer in rows]
    table.insert(-1, ("PyTorch, 2 processes", f"{ours / keras:.2f}", "Keras 3.16's own DDP (nightly)"))
    again = [middle(newest(title)["Adam again"][2]) for _, title, row, _, _ in COSTS if row == "CrossShard(Adam)"]
    run = next(run for run in reversed(timing.stored()) if run["title"] == DDP)
    machine = run["machine"].partition(", load")[0]
    varying = newest(FIT.format(2, "s", "tensorflow"))["CrossShard(Adam)"][2].partition(" ")[2].strip("()")
    about = (
        f"Measured on {machine}, on {run['date']}. The same step measured twice gives {min(again)} to {max(again)}. "
        f"The quartiles on two TensorFlow devices are {varying}.\n"
    )
    bars = [(f"{where}: {peer}".replace("`", "").removesuffix(", fused"), cell) for where, cell, peer in rows]
    return "\n".join([markdown("replicas | time | compared with", table), about, run_all.bars(bars)])


@written
def speedup() -> str:
    names = {"torch": "PyTorch ranks", "jax": "JAX devices", "tensorflow": "TensorFlow devices"}
    rows = []
    for backend, name in names.items():
        (table,) = tables_of(f"Throughput of fit on 1 to 8 replicas of {backend}, one thread each")
        for model in ("MLP", "ConvNet", "transformer"):
            found = {row[1]: (row[3], row[5]) for row in table if row[0] == f"{model}, weak"}
            ours = [found[number][0] for number in ("1", "2", "4", "8")]
            rows.append((name, model, *ours, found["2"][1]))
    return markdown("replicas | model | 1 | 2 | 4 | 8 | 2, peer", rows)


@written
def gpu() -> str:
    optimizers = ("Keras Adam", "CrossShard(Adam)", "torch.optim.Adam(fused=True)")
    rows = []
    for backend, name in {"torch": "PyTorch", "jax": "JAX"}.items():
        tables = tables_of(f"On a GPU with {backend}")
        for size, table in zip(("100 million", "1 billion"), tables):  # the default of `--weights`
            times = {row[0]: row[1] for row in table}
            rows.append((f"{name}, {size} weights", *(times.get(optimizer, "") for optimizer in optimizers)))
    return markdown("update | Keras' Adam | `CrossShard(Adam)` | `torch.optim.Adam(fused=True)`", rows)


@written
def small_models() -> str:
    rows = []
    for ranks in (1, 2, 4, 8):
        (cell,) = (row[4] for row in scaling(ranks) if row[:2] == ["1,000,000", "10"])
        rows.append((ranks, middle(cell)))
    return markdown("processes | time, relative to a DDP loop", rows)


@written
def options() -> str:
    found = newest("A step of fit in each mode on 2 replicas of torch")
    names = [name for name in found if not name.startswith("CrossShard(Adam)")]
    rows = [(f"`{name}`", middle(found[name][2])) for name in sorted(names, key=lambda name: found[name][2])]
    alone = float(found["CrossShard(Adam)"][1])
    head = (
        f"The time of one `fit` step on two PyTorch processes, relative to `CrossShard(Adam)` alone ({alone:.0f} ms):\n"
    )
    return "\n".join([head, markdown("option or wrapper | time", rows)])


def scaling(ranks: int) -> list[list[str]]:
    """All rows; the first two cells are the numbers of parameters and variables."""
    (table,) = tables_of(f"How a step grows on {ranks} ranks of PyTorch")
    return table


@written
def growth() -> str:
    ranks = (1, 2, 4, 8)
    cells = {(*row[:2], n): middle(row[4]) for n in ranks for row in scaling(n)}
    sizes = sorted({key[:2] for key in cells}, key=lambda size: [int(part.replace(",", "")) for part in size])
    rows = [(*size, *(cells.get((*size, n), "") for n in ranks)) for size in sizes]
    return markdown("parameters | variables | 1 rank | 2 ranks | 4 ranks | 8 ranks", rows)


@written
def one_more_variable() -> str:
    rows = []
    for ranks in (2, 4, 8):
        times = {row[1]: [float(cell) for cell in row[2:4]] for row in scaling(ranks) if row[0] == "1,000,000"}
        each = [(many - few) / 990 for few, many in zip(times["10"], times["1000"])]
        rows.append((ranks, *(f"{milliseconds:.2f} ms" for milliseconds in each)))
    return markdown("ranks | DDP loop | `fit`", rows)


@written
def machines() -> str:
    title = "A step of fit on two machines (network namespaces) against one, {}, 2 processes"
    names = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}
    rows = [(name, middle(newest(title.format(key))["two machines"][2])) for key, name in names.items()]
    return markdown("backend | time", rows)


@written
def parts() -> str:
    backends = ("torch", "jax", "tensorflow")
    rows = []
    for table, model in enumerate(("3 dense layers", "convolution, attention")):
        for replicas in (2, 4):
            for number in (replicas, 8):
                cells = []
                for backend in backends:
                    found = tables_of(f"A step in parts on {replicas} replicas of {backend}")[table]
                    (cell,) = (row[2] for row in found if row[0] == f"virtual_replicas={number}")
                    cells.append(middle(cell))
                rows.append((model, replicas, number, *cells))
    return markdown("model | replicas | virtual | PyTorch | JAX | TensorFlow", rows)


@written
def compression() -> str:
    found = collections.defaultdict(list)
    for line in lines("compression"):
        found[line["task"], line["scheme"]].append(line["result"])
    base = statistics.mean(found["characters", "none"])
    rows = []
    for scheme in ("none", "bfloat16", *(f"{name}{end}" for name in ("int8", "int4", "powersgd") for end in ("", NO))):
        digits, characters = found["digits", scheme], found["characters", scheme]
        name, _, end = scheme.partition(",")
        end = f", rank 2{',' if end else ''}{end}" if name == "powersgd" else f",{end}" if end else ""
        more = statistics.mean(characters) / base - 1
        rows.append(
            (
                "None" if name == "none" else f'"{name}"{end}',
                f"{statistics.mean(digits):.2f} ± {statistics.stdev(digits):.2f} %",
                f"{statistics.mean(characters):.3f} ± {statistics.stdev(characters):.3f}",
                f"{100 * more:.1f} %" if more else "",
            )
        )
    return markdown("`compression` | digits: accuracy | characters: loss | more loss", rows)


NO = ", no feedback"
WAYS = [f"{way}, H={every}" for way in ("mean", "DiLoCo", "DiLoCo without warm-up") for every in (5, 20, 50)]


@functools.cache
def local_sgd(task: str, mbit: float | None = None) -> dict[str, dict[str, Any]]:
    return {line["way"]: line for line in lines("local_sgd") if line["task"] == task and line["mbit"] == mbit}


def label(way: str) -> str:
    """The name of a way with its number of first synchronous updates."""
    name, _, every = way.partition(", H=")
    if not every:
        return name
    first = {"DiLoCo": f", {5 * int(every)} updates first", "DiLoCo without warm-up": ", none first"}
    return f"{name.partition(' ')[0]}, H = {every}{first.get(name, '')}"


@written
def losses() -> str:
    characters, digits = local_sgd("characters"), local_sgd("digits")
    rows = []
    for way in ("synchronous", *WAYS):
        if way in digits:
            fewer = digits["synchronous"]["bytes"] / digits[way]["bytes"]
            values = [f"{task[way]['losses'][-1]:.3f}" for task in (characters, digits)]
            rows.append((label(way), *values, "1" if fewer == 1 else f"1/{fewer:.2g}"))
    return markdown("training | characters | digits | bytes", rows)


@written
def equal_bytes() -> str:
    characters, digits = local_sgd("characters"), local_sgd("digits")
    start = "synchronous with the bytes of "
    rows = []
    for way in sorted((way for way in digits if way.startswith(start)), key=lambda way: -digits[way]["reductions"]):
        values = [f"{task[way]['losses'][-1]:.3f}" for task in (characters, digits)]
        other = way.removeprefix(start)
        rows.append((label(other if "," in other else f"mean, {other}"), digits[way]["reductions"], *values))
    return markdown("synchronous, with the bytes of | updates | characters | digits", rows)


def until(line: dict[str, Any], loss: float) -> int | None:
    """How many measurements it takes to reach a loss."""
    return next((number for number, value in enumerate(line["losses"], 1) if value <= loss), None)


@written
def link() -> str:
    rows = []
    for way in ("synchronous", "mean, H=5", "mean, H=20", "mean, H=50", "DiLoCo, H=20", "DiLoCo, H=50"):
        line = local_sgd("characters")[way]
        every = int(way.partition("H=")[2] or 1)
        first = 5 * every if way.startswith("DiLoCo") else 0
        # A ring of four replicas sends 2 * 3/4 of the gradients over each link, of 100 Mbit/s.
        seconds = 2 * 3 / 4 * 4 * 8 * line["weights"] / 100e6
        cells = []
        for loss in (1.6, 1.55):
            updates = line["every"] * (until(line, loss) or 0)
            reductions = min(updates, first) + max(updates - first, 0) / every
            cells += [f"{updates:,}", f"{seconds * reductions:.2g} s"]
        rows.append((label(way), *cells))
    return markdown("training | updates to 1.6 | network | updates to 1.55 | network", rows)


@written
def delayed() -> str:
    rows = []
    for way in ("synchronous", "mean, H=20", "DiLoCo, H=20"):
        line = local_sgd("characters", 100.0)[way]
        reached = [until(line, loss) or 0 for loss in (1.75, 1.7)]
        cells = [f"{line['seconds'][number - 1]:.0f} s, {line['every'] * number:,} updates" for number in reached]
        rows.append((label(way), *cells, f"{line['seconds'][-1]:.0f} s"))
    return markdown("training | until 1.75 | until 1.7 | 1,000 updates", rows)


def page(text: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


if __name__ == "__main__":
    for file in DOCS.rglob("*.md"):
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
