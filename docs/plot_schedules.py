"""Draws every schedule into docs/images/schedules.png. Needs matplotlib.

python docs/plot_schedules.py [--output FILE]
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from keras_shardopt import schedules as s

NUM_STEPS = 100

# One panel per schedule: a label for each curve, and the curve.
PANELS: dict[str, dict[str, Any]] = {
    "FixedLR": {"learning_rate=0.6": s.FixedLR(0.6), "learning_rate=0.3": s.FixedLR(0.3)},
    "PiecewiseConstant": {
        "decay_rates=[0.5, 0.1]": s.PiecewiseConstant(1.0, [40, 70], [0.5, 0.1]),
        "decay_rates=[0.3, 0.6]": s.PiecewiseConstant(1.0, [40, 70], [0.3, 0.6]),
    },
    "ExpDecay": {
        "continuous": s.ExpDecay(1.0, 20, 0.5, use_staircase_decay=False),
        "staircase": s.ExpDecay(1.0, 20, 0.5, use_staircase_decay=True),
        "begin_decay_at=30, min_lr=0.2": s.ExpDecay(
            1.0, 20, 0.5, False, begin_decay_at=30, min_lr=0.2
        ),
    },
    "PolyDecay": {
        "power=1": s.PolyDecay.from_run(NUM_STEPS, learning_rate=1.0, warmup_steps=15),
        "power=2": s.PolyDecay.from_run(
            NUM_STEPS, learning_rate=1.0, power=2, warmup_steps=15
        ),
        "power=0.5, min_lr=0.2": s.PolyDecay.from_run(
            NUM_STEPS, learning_rate=1.0, power=0.5, min_lr=0.2, warmup_steps=15
        ),
    },
    "CosineDecay": {
        "min_lr=0": s.CosineDecay.from_run(NUM_STEPS, learning_rate=1.0),
        "min_lr=0.2, warmup_steps=15": s.CosineDecay.from_run(
            NUM_STEPS, learning_rate=1.0, min_lr=0.2, warmup_steps=15
        ),
        "begin_decay_at=50": s.CosineDecay.from_run(
            NUM_STEPS, learning_rate=1.0, begin_decay_at=50
        ),
    },
    "InvPolyDecay": {
        "power=1": s.InvPolyDecay(1.0, NUM_STEPS, min_lr=0.1),
        "power=2": s.InvPolyDecay(1.0, NUM_STEPS, min_lr=0.1, power=2.0),
        "power=0.5": s.InvPolyDecay(1.0, NUM_STEPS, min_lr=0.1, power=0.5),
    },
    "TransformerPolicy": {
        "warmup_steps=10": s.TransformerPolicy(25.0, d_model=64, warmup_steps=10),
        "warmup_steps=40": s.TransformerPolicy(25.0, d_model=64, warmup_steps=40),
        "warmup_steps=10, max_lr=0.6": s.TransformerPolicy(
            25.0, d_model=64, warmup_steps=10, max_lr=0.6
        ),
    },
    "Warmup": {
        "of PolyDecay": s.Warmup(s.PolyDecay(1.0, 70), 30),
        "start_factor=0.3": s.Warmup(s.PolyDecay(1.0, 70), 30, start_factor=0.3),
        "delay_schedule=False": s.Warmup(s.PolyDecay(1.0, 70), 30, delay_schedule=False),
    },
    "Join": {
        "three pieces": s.Join(
            [0.3, s.CosineDecay(1.0, 40), s.ExpDecay(0.5, 10, 0.5, False)], [20, 60]
        ),
        "restarts": s.Join(
            [s.CosineDecay(0.9 * 0.7**i, 25) for i in range(4)], [25, 50, 75]
        ),
    },
    "ScaledByReplicas": {
        "one replica": s.CosineDecay(0.12, NUM_STEPS),
        "8 replicas, linear": s.ScaledByReplicas(
            s.CosineDecay(0.12, NUM_STEPS), 8, warmup_steps=20
        ),
        "8 replicas, sqrt": s.ScaledByReplicas(
            s.CosineDecay(0.12, NUM_STEPS), 8, "sqrt", warmup_steps=20
        ),
    },
}


def main() -> None:
    """Draws the panels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).parent / "images" / "schedules.png"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    output = parser.parse_args().output

    plt.rcParams.update(
        {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    )
    colors = ["#0b5cad", "#d1662b", "#3f8f5b"]
    figure, axes = plt.subplots(
        2, 5, figsize=(13, 5), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (title, curves) in zip(axes.flat, PANELS.items()):
        for (label, schedule), color in zip(curves.items(), colors):
            steps_up = title == "PiecewiseConstant" or label == "staircase"
            schedule.plot(
                NUM_STEPS + 1,
                ax,
                label=label,
                color=color,
                drawstyle="steps-post" if steps_up else "default",
            )
        ax.set_title(title, fontweight="bold", fontsize=9)
        ax.set_ylim(0, 1.42)
        ax.set_yticks([0, 0.5, 1])
        ax.set_xlim(0, NUM_STEPS)
        ax.grid(alpha=0.2)
        ax.legend(frameon=False, loc="upper right", fontsize=7.5, borderaxespad=0)
        ax.label_outer()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100, pil_kwargs={"optimize": True})
    print(f"{len(PANELS)} schedules drawn into {output}")


if __name__ == "__main__":
    main()
