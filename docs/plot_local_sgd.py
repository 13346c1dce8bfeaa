"""Draws the results of benchmarks/local_sgd.py into docs/images/local_sgd.svg.

    python docs/plot_local_sgd.py [--output FILE]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
WAYS = {
    "synchronous": ("0.5", "-"),
    "mean, H=20": ("tab:blue", "--"),
    "mean, H=50": ("tab:orange", "--"),
    "DiLoCo, H=20": ("tab:blue", "-"),
    "DiLoCo, H=50": ("tab:orange", "-"),
}


def main() -> None:
    """Reads and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=pathlib.Path, default=ROOT / "docs/images/local_sgd.svg"
    )
    arguments = parser.parse_args()
    lines = (ROOT / "benchmarks/results/local_sgd.jsonl").read_text().splitlines()
    found = {
        line["way"]: line
        for line in map(json.loads, lines)
        if line["task"] == "characters" and not line["mbit"]
    }

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text as text, and nothing of the day it was drawn: the file changes when the numbers do.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "local_sgd"})
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True, layout="constrained")
    for way, (color, style) in WAYS.items():
        line = found[way]
        updates = [line["every"] * (i + 1) for i in range(len(line["losses"]))]
        warmup = 5 * int(way.split("=")[1]) if "DiLoCo" in way else 0
        every = int(way.split("=")[1]) if "=" in way else 1
        times = [min(n, warmup) + max(n - warmup, 0) / every for n in updates]
        sent = [4 * line["weights"] * number / 1e6 for number in times]
        for panel, places in zip(panels, (updates, sent)):
            panel.plot(
                places,
                line["losses"],
                style,
                color=color,
                label=way if panel is panels[0] else None,
            )
    panels[0].set_xlabel("updates")
    panels[0].set_ylabel("held-out loss")
    panels[1].set_xlabel("MB given to reductions by each replica")
    panels[1].set_xscale("log")
    panels[0].set_ylim(1.4, 2.4)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
