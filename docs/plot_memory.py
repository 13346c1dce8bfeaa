"""Draws the optimizer state that each replica holds, whole and divided, into docs/images/memory.svg.

    python docs/plot_memory.py [--output FILE]

The bytes are those of `memory_report()`, on eight CPU devices of JAX. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras

import keras_shardopt as ks

NUM_REPLICAS = (1, 2, 4, 8)


def megabytes(num_replicas: int, shard_state: bool) -> float:
    """The bytes of the fullest replica."""
    with ks.data_parallel(num_replicas):
        layers = [
            keras.Input((16,), dtype="int32"),
            keras.layers.Embedding(20_000, 64),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(64),
        ]
        model = keras.Sequential(layers)
        optimizer = ks.CrossShard(keras.optimizers.Adam(), shard_state=shard_state)
        optimizer.build(model.trainable_variables)
        report = optimizer.memory_report()
    keras.distribution.set_distribution(None)
    return max(report.held) / 2**20


def main() -> None:
    """Measures and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent / "images" / "memory.svg",
    )
    parser.add_argument(
        "--numbers", action="store_true", help="print them, and draw nothing"
    )
    arguments = parser.parse_args()
    whole = [megabytes(n, False) for n in NUM_REPLICAS]
    divided = [megabytes(n, True) for n in NUM_REPLICAS]
    print("replicas", *NUM_REPLICAS)
    print("whole", *(f"{size:.3f}" for size in whole))
    print("divided", *(f"{size:.3f}" for size in divided))
    if arguments.numbers:
        return

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text as text, and nothing of the day it was drawn: the file changes when the numbers do.
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "memory", "font.family": "sans-serif"}
    )
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    places = range(len(NUM_REPLICAS))
    for sizes, shift, color, label in ((whole, -0.2, "0.6", "CrossShard(Adam())"),
                                       (divided, 0.2, "tab:blue", "CrossShard(Adam(), shard_state=True)")):  # fmt: skip
        bars = axes.bar(
            [place + shift for place in places], sizes, 0.38, color=color, label=label
        )
        axes.bar_label(bars, [f"{size:.2f}" for size in sizes], fontsize=8)
    axes.set_xticks(list(places), [str(n) for n in NUM_REPLICAS])
    axes.set_xlabel("replicas")
    axes.set_ylabel("MiB of state on each replica")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
