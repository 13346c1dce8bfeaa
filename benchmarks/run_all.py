"""Runs every benchmark on this machine, and writes a page with their newest results, docs/benchmarks.md.

    python benchmarks/run_all.py [--only torch_fit modes]
    python benchmarks/run_all.py --page      # only the page, from existing results
    python benchmarks/run_all.py --quick     # checks in minutes that all of them run; writes no result and no page

`--quick` omits commands that differ from an earlier one only in a number, such as that of ranks.

The machine should be otherwise idle, for about half an hour on two cores. With `--minutes 20`, benchmarks that have not
started after 20 minutes (the last ones) are omitted, and the page has their previous results. Benchmarks that need a
missing package or a GPU are omitted with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import timing

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
ALL_SIZES = "--rounds 3 --many 8 --parameters 1e4 1e5 1e6 1e7 --variables 10 100 1000 3000"
SOME_SIZES = "--rounds 3 --many 8 --parameters 1e4 1e6 --variables 10 100 1000"  # for ranks that share cores
COMMANDS: list[tuple[str, str, list[str]]] = [
    ("torch", "torch_fit.py", [*TORCHRUN, "2"]),
    ("torch", "torch_shards.py", [*TORCHRUN, "2"]),
    *[("torch", "checkpoints.py --rounds 6", [*TORCHRUN, ranks]) for ranks in ("2", "4")],
    ("torch", "torch_update.py --threads 1", []),
    ("jax", "jax_update.py", []),
    ("tensorflow", "tensorflow_update.py", []),
    *[(backend, "fit.py", []) for backend in ("jax", "tensorflow", "torch")],
    ("jax", "fit.py --replicas 8", []),
    ("tensorflow", "fit.py --replicas 2", []),
    ("torch", "modes.py", [*TORCHRUN, "2"]),
    ("jax", "modes.py --replicas 8 --rounds 7", []),
    ("tensorflow", "modes.py --replicas 2 --rounds 7", []),
    ("torch", "virtual_replicas.py", [*TORCHRUN, "2"]),
    ("torch", "virtual_replicas.py", [*TORCHRUN, "4"]),
    *[(backend, f"virtual_replicas.py --replicas {n}", []) for backend in ("jax", "tensorflow") for n in (2, 4)],
    *[(backend, "variables.py --most 1000", []) for backend in ("jax", "tensorflow", "torch")],
    *[("torch", f"scaling.py {ALL_SIZES}", [*TORCHRUN, ranks]) for ranks in ("2", "1")],
    *[("torch", f"scaling.py {SOME_SIZES}", [*TORCHRUN, ranks]) for ranks in ("4", "8")],
    *[(backend, "speedup.py", []) for backend in ("torch", "jax", "tensorflow")],
    *[(backend, "accumulation.py", []) for backend in ("jax", "tensorflow", "torch")],
    *[(backend, "summaries.py", []) for backend in ("jax", "tensorflow", "torch")],
    *[(backend, "machines.py", []) for backend in ("torch", "jax", "tensorflow")],
    *[(backend, "gpu.py", []) for backend in ("torch", "jax")],
]

HEAD = """---
search:
  boost: 0.2
---

# Benchmarks

The newest result of each benchmark, with its date, machine, versions and command; `python benchmarks/run_all.py` runs
them again. A bar shows the time relative to the row with 1.00 (the dashed line); the thin line spans the quartiles.
The last column holds the first ratios of an older result, if there is one.
[Performance](performance.md) has the summary, and [notes](#notes-on-the-measurements) explain single ratios.
"""


def run(backend: str, script: str, start: list[str], how: str, limit: float) -> str | None:
    """Runs one, and returns the last line of its output if it failed."""
    name, *arguments = script.split()
    command = [*(start or [sys.executable]), str(HERE / name), *arguments, how]
    print(f"KERAS_BACKEND={backend} {' '.join(command)}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, "KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        process.communicate()
        return f"took longer than {limit:g} s"
    print(f"{stdout}{time.monotonic() - began:.0f} s\n", flush=True)
    return None if process.returncode == 0 else (stderr.strip().splitlines() or ["failed"])[-1]


def kept() -> list[list[dict[str, Any]]]:
    """Returns the runs of each title by date, in the order of the titles."""
    return [list(runs) for _, runs in itertools.groupby(timing.stored(), lambda run: run["title"])]


ROW = re.compile(r"^\| (?P<name>[^|]*[^| ]) \|( [\d.]+ \|)+ (?P<ratio>[\d.]+) \((?P<low>[\d.]+) to (?P<high>[\d.]+)\)")


def rows_of(lines: list[str]) -> list[re.Match[str]]:
    return [found for line in lines if (found := ROW.match(line))]


def with_before(table: list[str], older: dict[str, Any]) -> list[str]:
    """Adds the first ratios of an older result as the last column, if it has any of these rows."""
    before = {row["name"]: row["ratio"] for row in rows_of(timing.markdown(older).splitlines())}
    if not any(row["name"] in before for row in rows_of(table)):
        return table
    cells = [before.get(row["name"], "") if (row := ROW.match(line)) else "" for line in table]
    cells[:2] = [f"before, {older['date']}", "---"]
    return [f"{line} {cell} |" if cell != "---" else f"{line}---|" for line, cell in zip(table, cells, strict=True)]


def picture(table: list[str]) -> str:
    """Draws the first ratios of a table as bars, in SVG."""
    rows = [(row["name"], f"{row['ratio']} ({row['low']} to {row['high']})") for row in rows_of(table)]
    return bars(rows) if len(rows) > 1 else ""


def bars(rows: list[tuple[str, str]]) -> str:
    """Draws ratios with their quartiles as bars. Names stand above the bars, so they are readable on a phone."""
    found = [(name, *map(float, re.findall(r"[\d.]+", cell))) for name, cell in rows]
    unit = 380 / max(high for *_, high in found)
    shapes = []
    for number, (name, ratio, low, high) in enumerate(found):
        top = 36 * number
        label = name.replace("&", "&amp;").replace("<", "&lt;")
        kind = ' class="ours"' if "CrossShard" in label or "fit," in label else ""
        shapes += [
            f'<text x="0" y="{top + 12}">{label}</text>',
            f'<rect{kind} x="0" y="{top + 17}" width="{ratio * unit:.1f}" height="12" rx="2"/>',
            f'<path d="M{low * unit:.1f} {top + 23}H{high * unit:.1f}"/>',
            f'<text x="{high * unit + 6:.1f}" y="{top + 27}">{ratio:.2f}</text>',
        ]
    height = 36 * len(rows)
    return (
        f'<svg class="bars" viewBox="0 0 440 {height}" width="440" role="img" aria-label="times as bars">'
        f'<path class="one" d="M{unit:.1f} 0V{height}"/>{"".join(shapes)}</svg>\n'
    )


def page() -> str:
    """Returns the page with the newest results."""
    parts = [HEAD]
    for runs in kept():
        oldest, newest = runs[0], runs[-1]
        lines = timing.markdown(newest).replace("# ", "## ", 1).splitlines()
        table: list[str] = []
        for line in [*lines, ""]:
            if line.startswith("|"):
                table.append(line)
            elif table:
                parts += [*(table if oldest is newest else with_before(table, oldest)), "", picture(table)]
                table = []
            if not line.startswith("|"):
                parts.append(line)
    parts.append((HERE / "notes.md").read_text(encoding="utf-8"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write only the page, without running benchmarks")
    parser.add_argument("--quick", action="store_true", help="run all with small sizes, without writing results")
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts, without `.py`")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a benchmark is stopped")
    parser.add_argument("--minutes", type=float, default=600.0, help="minutes after which no benchmark starts")
    arguments = parser.parse_args()
    left_out, seen = {}, set()
    last_start = time.monotonic() + 60 * arguments.minutes
    for backend, script, start in [] if arguments.page else COMMANDS:
        kind = backend, *(word for word in script.split() if word.endswith(".py") or word.startswith("--"))
        is_new = not arguments.quick or kind not in seen
        seen.add(kind)
        if is_new and (not arguments.only or script.partition(".")[0] in arguments.only):
            reason: str | None = "no time was left"
            if time.monotonic() < last_start:
                reason = run(backend, script, start, "--quick" if arguments.quick else "--write", arguments.limit)
            if reason is not None:
                left_out[f"{script} on {backend}"] = reason
    if not arguments.quick:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE}")
    for what, reason in left_out.items():
        print(f"left out: {what}: {reason}")
    sys.exit(bool(arguments.quick and left_out))


if __name__ == "__main__":
    main()
