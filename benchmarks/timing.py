"""What the benchmarks share: runs in turns, ratios to one of them with their spread, and a dated page of results."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence

RESULTS = pathlib.Path(__file__).with_name("results")


def in_turns(
    runs: dict[str, Callable[[], None]],
    num_rounds: int,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """The seconds of each run in each round, so that what else the machine does meets all alike.

    Args:
        runs: by name, what is measured. Each runs once before.
        num_rounds: how often each is measured.
        wait: called before and after each, so that processes and devices are idle.
        clock: what is measured; `time.process_time` where the machine is not idle.
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
    """The median of a run's time over another's in the same round, and the quartiles."""
    found = sorted(a / b for a, b in zip(seconds[name], seconds[base]))
    if len(found) < 2:
        return found[0], found[0], found[0]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return statistics.median(found), low, high


def table(seconds: dict[str, list[float]], bases: Sequence[str], steps: int = 1) -> str:
    """A Markdown table: milliseconds of a step, and ratios to each of the bases."""
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
    """Prints a result, and with `write` puts it on a page of its own in `results/`."""
    today = datetime.date.today().isoformat()
    about = ", ".join(
        f"{name} {version}" for name, version in {"Python": platform.python_version(), **versions}.items()
    )
    page = (
        f"# {title}\n\n{today}. {hardware()}. {about}. Medians over rounds in turns, with quartiles of the ratios.\n\n"
        f"    {command}\n\n{text}\n"
    )
    print(page)
    if write:
        RESULTS.mkdir(exist_ok=True)
        name = "_".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
        (RESULTS / f"{today}_{name}.md").write_text(page)


def hardware() -> str:
    """The CPU, its cores that this process may use, and how busy the machine is."""
    model = platform.processor() or platform.machine()
    information = pathlib.Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load average {os.getloadavg()[0]:.1f} when it ended" if hasattr(os, "getloadavg") else ""
    return f"{model}, {cores} cores{load}"
