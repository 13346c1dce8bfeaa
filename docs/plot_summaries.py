"""Draws summaries of examples/char_lm.py, read from its event files, into docs/images/summaries.png. Needs matplotlib.

python examples/char_lm.py --steps 250 --every 5 --log-dir logs/clipping
python examples/char_lm.py --steps 250 --every 5 --log-dir logs/LARC --larc
python docs/plot_summaries.py logs [--output FILE]
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PREFIX = "Loss_Optimization/"
VARIABLE = "sequential/conv1d_2/kernel"
SCALARS = [
    "train_loss",
    "learning_rate",
    f"{PREFIX}loss_scale",
    f"{PREFIX}global_gradient_norm",
    f"{PREFIX}global_clipped_gradient_norm",
    f"{PREFIX}gradient_norm/{VARIABLE}",
    f"{PREFIX}variable_norm/{VARIABLE}",
    f"{PREFIX}larc_final_lr/{VARIABLE}",
]
HISTOGRAMS = [f"{PREFIX}gradients/{VARIABLE}", f"{PREFIX}variables/{VARIABLE}"]
COLORS = ["#0b5cad", "#d1662b"]


def draw_distribution(ax: Any, histograms: list[Any], color: str) -> None:
    """The quantiles of a histogram over the steps, as TensorBoard's page of distributions has them."""
    quantiles = [0.001, 0.067, 0.159, 0.309, 0.5, 0.691, 0.841, 0.933, 0.999]
    bands = []
    for event in histograms:
        value = event.histogram_value
        counted = np.cumsum(value.bucket) / value.num
        limits = np.clip(value.bucket_limit, value.min, value.max)
        bands.append(np.interp(quantiles, counted, limits))
    steps, lines = [event.step for event in histograms], np.array(bands).T
    for low, high in zip(range(4), range(8, 4, -1)):
        ax.fill_between(
            steps, lines[low], lines[high], color=color, alpha=0.22, linewidth=0
        )
    ax.plot(steps, lines[4], color=color, linewidth=1)


def main() -> None:
    """Draws the panels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log_dir", type=pathlib.Path)
    default = pathlib.Path(__file__).parent / "images" / "summaries.png"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    arguments = parser.parse_args()
    everything = {"scalars": 0, "histograms": 0}
    folders = sorted(folder for folder in arguments.log_dir.iterdir() if folder.is_dir())
    runs = {
        folder.name: EventAccumulator(str(folder), size_guidance=everything).Reload()
        for folder in folders
    }

    plt.rcParams.update(
        {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(2, 5, figsize=(15, 5), layout="constrained")
    for ax, tag in zip(axes.flat, SCALARS + HISTOGRAMS):
        for (name, run), color in zip(runs.items(), COLORS):
            if tag in run.Tags()["scalars"]:
                events = run.Scalars(tag)
                ax.plot(
                    [e.step for e in events],
                    [e.value for e in events],
                    label=name,
                    color=color,
                    linewidth=1.2,
                )
        if tag in HISTOGRAMS:
            draw_distribution(ax, runs[folders[0].name].Histograms(tag), COLORS[0])
        ax.set_title(tag.removeprefix(PREFIX), fontsize=7.5)
        ax.grid(alpha=0.2)
    axes.flat[0].legend(frameon=False)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=90, pil_kwargs={"optimize": True})
    print(
        f"{len(SCALARS) + len(HISTOGRAMS)} summaries of {len(runs)} runs drawn into {arguments.output}"
    )


if __name__ == "__main__":
    main()
