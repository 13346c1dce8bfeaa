"""Draws the times that the callback `StepReport` has measured as a bar chart."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt.callbacks.slow_ranks import PHASES

_COLORS = ("#e69f00", "#0072b2", "#56b4e9", "#cc79a7", "#d55e00", "#dddddd", "#009e73")


def plot_step_report(path: str | os.PathLike[str]) -> Any:
    """Draws the file of a `callbacks.StepReport(to=...)` with matplotlib: a bar per rank, divided into phases.

    A bar is the mean step over all windows of the file, in milliseconds. The gray part is waiting for other ranks, so
    the bar of a slow rank has the least gray.

    Args:
        path: path of the JSON-lines file.

    Returns:
        The `Axes` of a new figure. Its `figure.savefig(...)` writes a file.

    Raises:
        TypeError, ValueError: if `path` is not a path, or not a readable file of a `StepReport`.
        ImportError: if matplotlib is not installed (`pip install "keras-shardopt[plot]"`).

    Example:
        >>> import keras_shardopt as ks
        >>> ks.plot_step_report("steps.jsonl").figure.savefig("steps.png")  # doctest: +SKIP
    """
    path = check.local_path("path", path)
    try:
        with open(path, encoding="utf-8") as file:
            windows = [json.loads(line) for line in file]
        table = [[[rank[phase] for phase in PHASES] for rank in window["ranks"]] for window in windows]
        mean = np.average(table, axis=0, weights=[window["num_steps"] for window in windows])
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            "`path` must be a file of `StepReport(to=...)`, written by jobs with the same number of ranks. "
            f"Received: path={path!r} ({type(error).__name__}: {error})"
        ) from error
    try:
        from matplotlib.figure import Figure  # optional, slow to import
    except ModuleNotFoundError as error:
        raise ImportError("`plot_step_report` requires matplotlib. Run `pip install matplotlib`.") from error

    ax = Figure(figsize=(8, 1.8 + 0.35 * len(mean)), layout="constrained").add_subplot()
    starts = np.zeros(len(mean))
    for phase, color, lengths in zip(PHASES, _COLORS, mean.T):
        if lengths.any():
            ax.barh(range(len(mean)), lengths, left=starts, color=color, label=phase)
        starts += lengths
    slow = windows[-1].get("slow")
    ax.set(xlabel="ms per step", yticks=range(len(mean)), yticklabels=[f"rank {i}" for i in range(len(mean))])
    ax.set_title(slow["words"] if slow else "No rank is slow", fontsize="medium")
    ax.invert_yaxis()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return ax
