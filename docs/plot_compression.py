"""Draws the losses of compressed gradients, with and without error feedback, into docs/images/compression.svg.

    python docs/plot_compression.py [--output FILE]

The numbers are those of benchmarks/results/compression.jsonl, by benchmarks/fewer_bytes.py. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
SCHEMES = ["none", "bfloat16", "int8", "int4", "powersgd"]
NO = ", no feedback"


def results(task: str) -> dict[str, dict[int, float]]:
    """By scheme and seed."""
    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for line in (
        (ROOT / "benchmarks" / "results" / "compression.jsonl").read_text().splitlines()
    ):
        row = json.loads(line)
        if row["task"] == task:
            found[row["scheme"]][row["seed"]] = row["result"]
    return found


def main() -> None:
    """Draws."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "keras_shardopt", "font.size": 9})
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=ROOT / "docs" / "images" / "compression.svg"
    )
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    titles = {
        "digits": "digits: errors of 397, %",
        "characters": "characters: held-out loss, nats",
    }
    for axis, (task, title) in zip(axes, titles.items()):
        found = results(task)
        for shift, marker, ending, label in (
            (-0.12, "o", "", "with feedback"),
            (0.12, "x", NO, "without"),
        ):
            for place, scheme in enumerate(SCHEMES):
                values = found.get(scheme + ending, {}).values()
                values = np.array([100 - v if task == "digits" else v for v in values])
                color = "C0" if marker == "o" else "C3"
                first = place == 2
                places = np.full(len(values), place + shift)
                axis.plot(places, values, marker, color=color, alpha=0.35, ms=4, ls="none")
                if len(values):
                    axis.plot(
                        [place + shift],
                        [values.mean()],
                        "_",
                        color=color,
                        ms=16,
                        label=label if first else None,
                    )
        axis.set_xticks(range(len(SCHEMES)), SCHEMES)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_title(title, fontsize=9)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(parser.parse_args().output, metadata={"Date": None})


if __name__ == "__main__":
    main()
