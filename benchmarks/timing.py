"""Shared by all benchmarks: alternating runs, ratios with their spread, and files of results.

Each benchmark has one file in `results/`, in JSON Lines. A line is one run: its title, date, machine, versions, command
and parts. A part is a paragraph, or a table with its columns and rows. `of` is set if older code was measured later: it
names that code.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).with_name("results")


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the common arguments. `rounds`: the default number of repetitions."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    made.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    made.add_argument("--rounds", type=int, default=rounds, help="repetitions of each measurement")
    return made


def in_turns(
    runs: dict[str, Callable[[], None]],
    num_rounds: int,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round. Runs alternate, so other load affects all of them equally.

    Args:
        runs: functions to measure, by name. Each is called once before.
        num_rounds: number of measurements of each.
        wait: called before and after each run, to wait for processes and devices.
        clock: the clock; `time.process_time` on a busy machine.
    """
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wait()
            start = clock()
            runs[name]()
            wait()
            seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Returns the median ratio of two runs' times in the same round, and its quartiles."""
    found = sorted(a / b for a, b in zip(seconds[name], seconds[base]))
    if len(found) < 2:
        return found[0], found[0], found[0]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return statistics.median(found), low, high


def table(seconds: dict[str, list[float]], bases: Sequence[str], steps: int = 1) -> str:
    """Returns a Markdown table: milliseconds per step, and ratios to each of the bases."""
    head = ["", "ms, median", *[f"time / {base}" for base in bases]]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, each in seconds.items():
        cells = [name, f"{1000 * statistics.median(each) / steps:.2f}"]
        for base in bases:
            middle, low, high = ratios(seconds, name, base)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(title: str, command: str, text: str, versions: dict[str, str], write: bool) -> None:
    """Prints a run. With `write`, stores it in the benchmark's file, and replaces an earlier run of the same day."""
    run = {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "machine": hardware(),
        "versions": {"Python": platform.python_version(), **versions},
        "command": command,
        "parts": parts(text),
    }
    print(markdown(run))
    if write:
        store(run)


def store(run: dict[str, Any]) -> None:
    """Adds a run to the file of its benchmark."""
    RESULTS.mkdir(exist_ok=True)
    (benchmark,) = re.findall(r"(\w+)\.py\b", run["command"])
    file = RESULTS / f"{benchmark}.jsonl"
    others = [each for each in read(file) if (each["title"], each["date"]) != (run["title"], run["date"])]
    runs = sorted([*others, run], key=lambda each: (each["title"], each["date"]))
    file.write_text("".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in runs), encoding="utf-8")


def read(file: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the runs in a file, without those for `plot_*.py`, which have other fields."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [run for line in lines if "title" in (run := json.loads(line))]


def stored() -> list[dict[str, Any]]:
    """Returns all runs, by title and date."""
    runs = [run for file in RESULTS.glob("*.jsonl") for run in read(file)]
    return sorted(runs, key=lambda run: (re.sub(r"\W+", "_", run["title"].lower()), run["date"]))


def parts(text: str) -> list[Any]:
    """Parses a Markdown text into paragraphs, and tables with columns and rows."""
    found: list[Any] = []
    for paragraph in re.split(r"\n\n+", text.strip()):
        if paragraph.startswith("|"):
            head, _, *rows = [[cell.strip() for cell in line.split(" | ")] for line in _inside(paragraph)]
            found.append({"columns": head, "rows": rows})
        else:
            found.append(paragraph)
    return found


def _inside(table: str) -> list[str]:
    return [line.removeprefix("|").removesuffix("|") for line in table.splitlines()]


def markdown(run: dict[str, Any]) -> str:
    """Returns a run as a page."""
    about = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    paragraphs = [
        f"# {run['title']}",
        f"{run.get('of', run['date'])}. {run['machine']}. {about}. "
        "Medians over repetitions in turns, with quartiles of the ratios.",
        " \\\n".join(f"    {line}" for line in textwrap.wrap(run["command"], 86, break_on_hyphens=False)),
    ]
    for part in run["parts"]:
        if isinstance(part, dict):
            lines = ["| " + " | ".join(row) + " |" for row in (part["columns"], *part["rows"])]
            part = "\n".join([lines[0], "|---" * len(part["columns"]) + "|", *lines[1:]])
        paragraphs.append(part)
    return "\n\n".join(paragraphs) + "\n"


def hardware() -> str:
    """Returns the CPU, the number of cores available to this process, and the load of the machine."""
    model = platform.processor() or platform.machine()
    information = pathlib.Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load average {os.getloadavg()[0]:.1f} when it ended" if hasattr(os, "getloadavg") else ""
    return f"{model}, {cores} cores{load}"
