"""Draws pictures of the newest results in benchmarks/results/ into docs/images/.

python docs/draw_results.py
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

DOCS = pathlib.Path(__file__).parent
IMAGES = DOCS / "images"
RESULTS = DOCS.parent / "benchmarks" / "results"

PANELS = {
    "One step of fit on 2 PyTorch ranks (ms)": (
        "A step of fit on 2 ranks of PyTorch, 6 x Dense(1024), 64 rows",
        {
            "a DDP loop, Adam": "DDP + torch.optim.Adam",
            "a DDP loop, fused Adam": "DDP + torch.optim.Adam(fused=True)",
            "model.fit, CrossShard(Adam())": "fit, CrossShard(Adam)",
        },
    ),
    "One Adam update of 16.8 million weights, PyTorch (ms)": (
        "Updates of 16.8 million parameters on PyTorch",
        {
            "keras.optimizers.Adam": "Keras Adam",
            "torch.optim.Adam(fused=True)": "torch.optim.Adam(fused=True)",
            "CrossShard(keras.optimizers.Adam())": "CrossShard Adam",
        },
    ),
}
WIDTH, BARS, ROW = 460, 410, 40  # labels stand above bars, readable on a phone
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } rect { fill: #b3bac2 }
.end { text-anchor: end } .middle { text-anchor: middle } .axis { stroke: #b3bac2 } polyline { fill: none !important; stroke-width: 2 }
.grey { fill: #8c959f; stroke: #8c959f } .blue { fill: #2f6fde; stroke: #2f6fde } .red { fill: #d1495b; stroke: #d1495b }
.orange { fill: #d9822b; stroke: #d9822b } .dashed { stroke-dasharray: 5 3 } circle { opacity: .5; stroke: none }
.ours { fill: #2f6fde } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #6e7681 }
.ours { fill: #58a6ff } .axis { stroke: #6e7681 } .blue { fill: #58a6ff; stroke: #58a6ff } .red { fill: #ff7b8a; stroke: #ff7b8a } }"""


def lines(name: str) -> list[dict[str, Any]]:
    """The runs in a file."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def svg(width: int, height: int, shapes: list[str]) -> str:
    """A file of these shapes."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([start, f"<style>{STYLE}</style>", *shapes, "</svg>"]) + "\n"


def newest_rows(title: str) -> Iterator[list[str]]:
    """The rows of all tables in the newest run of that title."""
    runs = [run for file in RESULTS.glob("*.jsonl") for run in lines(file.stem)]
    newest = max(
        (run for run in runs if run.get("title") == title), key=lambda run: run["date"]
    )
    for part in newest["parts"]:
        yield from part["rows"] if isinstance(part, dict) else ()


def milliseconds(title: str) -> dict[str, float]:
    """The medians of the newest run of that title."""
    return {row[0]: float(row[1]) for row in newest_rows(title)}


def readme() -> str:
    """Times next to other libraries, as bars."""
    shapes, top = [], 4
    for title, (name, rows) in PANELS.items():
        times = milliseconds(name)
        longest = max(times[row] for row in rows.values())
        top += 26
        shapes.append(f'<text class="title" x="0" y="{top - 8}">{title}</text>')
        for label, row in rows.items():
            length = BARS * times[row] / longest
            kind = ' class="ours"' if "CrossShard" in row else ""
            shapes += [
                f'<text x="0" y="{top + 14}">{label}</text>',
                f'<rect{kind} x="0" y="{top + 20}" width="{length:.1f}" height="14" rx="2"/>',
                f'<text x="{length + 8:.1f}" y="{top + 32}">{times[row]:.0f}</text>',
            ]
            top += ROW
        top += 12
    return svg(WIDTH, top, shapes)


class Panel:
    """A plot of 390 x 200 with two axes, its title above.

    Args:
        top: its place in the picture.
        title: of the plot.
        x, y: the smallest and the largest value of each axis.
        log: the axes with a logarithmic scale.
    """

    def __init__(
        self,
        top: int,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        log: str = "",
    ) -> None:
        self.bottom = top + 220
        self.ranges = {"x": x, "y": y}
        self.log = log
        self.shapes = [
            f'<text class="title" x="0" y="{top + 12}">{title}</text>',
            f'<path class="axis" fill="none" d="M40 {top + 20}V{self.bottom}H430"/>',
        ]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The point in the picture."""
        return 40 + 390 * self._part("x", x), self.bottom - 200 * self._part("y", y)

    def _part(self, axis: str, value: float) -> float:
        low, high = self.ranges[axis]
        if axis in self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(max((value - low) / (high - low), 0), 1)

    def ticks(self, axis: str, values: dict[float, str]) -> None:
        """Labels of an axis."""
        for value, label in values.items():
            if axis == "x":
                x, _ = self.place(value, self.ranges["y"][0])
                place = f'class="middle" x="{x:.0f}" y="{self.bottom + 16}"'
            else:
                _, y = self.place(self.ranges["x"][0], value)
                place = f'class="end" x="34" y="{y + 4:.0f}"'
            self.shapes.append(f"<text {place}>{label}</text>")


SCHEMES = ("none", "bfloat16", "int8", "int4", "powersgd")


def compression() -> str:
    """The final errors and losses of each seed, with and without error feedback."""
    found = collections.defaultdict(list)
    for line in lines("compression"):
        error = 100 - line["result"] if line["task"] == "digits" else line["result"]
        found[line["task"], line["scheme"]].append(error)
    panels = [
        Panel(0, "digits: errors, %", (-0.5, 4.5), (0.5, 8), log="y"),
        Panel(270, "characters: held-out loss", (-0.5, 4.5), (1.85, 2.5)),
    ]
    panels[0].ticks("y", {value: f"{value:g}" for value in (0.5, 1, 2, 4, 8)})
    panels[1].ticks("y", {value: f"{value:g}" for value in (1.9, 2.1, 2.3, 2.5)})
    for panel, task in zip(panels, ("digits", "characters")):
        panel.ticks("x", dict(enumerate(SCHEMES)))
        for place, scheme in enumerate(SCHEMES):
            for shift, color, end in ((-0.12, "blue", ""), (0.12, "red", ", no feedback")):
                values = found[task, scheme + end]
                for value in values:
                    x, y = panel.place(place + shift, value)
                    panel.shapes.append(
                        f'<circle class="{color}" cx="{x:.0f}" cy="{y:.1f}" r="3"/>'
                    )
                if values:
                    x, y = panel.place(place + shift, statistics.mean(values))
                    panel.shapes.append(
                        f'<path class="{color}" stroke-width="2" d="M{x - 9:.0f} {y:.1f}h18"/>'
                    )
    key = list(legend(520, {"with error feedback": "blue", "without": "red"}))
    return svg(WIDTH, 545, [*panels[0].shapes, *panels[1].shapes, *key])


def legend(top: int, names: dict[str, str]) -> Iterator[str]:
    """Names and their colors, two in each row."""
    for number, (name, kind) in enumerate(names.items()):
        x, y = 40 + 200 * (number % 2), top + 18 * (number // 2)
        yield f'<polyline class="{kind}" points="{x},{y} {x + 26},{y}"/>'
        yield f'<text x="{x + 32}" y="{y + 4}">{name}</text>'


WAYS = {
    "synchronous": "grey",
    "mean, H=20": "blue dashed",
    "mean, H=50": "orange dashed",
    "DiLoCo, H=20": "blue",
    "DiLoCo, H=50": "orange",
}


def local_sgd() -> str:
    """The held-out loss over updates and over bytes."""
    found = {
        line["way"]: line
        for line in lines("local_sgd")
        if line["task"] == "characters" and not line["mbit"]
    }
    panels = [
        Panel(0, "characters: held-out loss over updates", (0, 2400), (1.4, 2.4)),
        Panel(
            270, "the same over MB sent by each replica", (0.2, 500), (1.4, 2.4), log="x"
        ),
    ]
    for panel in panels:
        panel.ticks("y", {value: f"{value:g}" for value in (1.4, 1.6, 1.8, 2, 2.2, 2.4)})
    panels[0].ticks("x", {value: f"{value:,}" for value in (0, 600, 1200, 1800, 2400)})
    panels[1].ticks("x", {value: f"{value:g}" for value in (1, 10, 100)})
    for way, kind in WAYS.items():
        line = found[way]
        updates = [line["every"] * (i + 1) for i in range(len(line["losses"]))]
        every = int(way.partition("H=")[2] or 1)
        warmup = 5 * every if "DiLoCo" in way else 0
        times = [min(n, warmup) + max(n - warmup, 0) / every for n in updates]
        sent = [4 * line["weights"] * number / 1e6 for number in times]
        for panel, places in zip(panels, (updates, sent)):
            points = [panel.place(*point) for point in zip(places, line["losses"])]
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            panel.shapes.append(f'<polyline class="{kind}" points="{drawn}"/>')
    key = list(legend(524, WAYS))
    return svg(WIDTH, 580, [*panels[0].shapes, *panels[1].shapes, *key])


MODELS = ("MLP", "ConvNet", "transformer")
BACKENDS = {"torch": "orange", "jax": "blue", "tensorflow": "red"}
LEGEND = {
    "PyTorch": "orange",
    "DDP loop, fused Adam": "orange dashed",
    "JAX": "blue",
    "Keras's DataParallel": "blue dashed",
    "TensorFlow": "red",
    "MirroredStrategy": "red dashed",
}


def speedup() -> str:
    """Rows per second on several replicas of two cores, with those of the peers dashed."""
    panels = {
        f"{model}, weak": Panel(
            260 * i, f"{model}: speedup over replicas", (1, 8), (0, 2), log="x"
        )
        for i, model in enumerate(MODELS)
    }
    for panel in panels.values():
        panel.ticks("x", {value: f"{value}" for value in (1, 2, 4, 8)})
        panel.ticks("y", {value: f"{value:g}" for value in (0, 0.5, 1, 1.5, 2)})
    for backend, color in BACKENDS.items():
        title = f"Throughput of fit on 1 to 8 replicas of {backend}, one thread each"
        found = collections.defaultdict(list)
        for name, replicas, _, ours, _, peers in newest_rows(title):
            if name in panels:
                panel = panels[name]
                found[panel, color].append(panel.place(int(replicas), float(ours)))
                found[panel, f"{color} dashed"].append(
                    panel.place(int(replicas), float(peers))
                )
        for (panel, kind), points in found.items():
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            panel.shapes.append(f'<polyline class="{kind}" points="{drawn}"/>')
    shapes = [shape for panel in panels.values() for shape in panel.shapes]
    return svg(WIDTH, 850, [*shapes, *legend(795, LEGEND)])


PICTURES = {
    "readme.svg": readme,
    "compression.svg": compression,
    "local_sgd.svg": local_sgd,
    "speedup.svg": speedup,
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (IMAGES / file).write_text(draw(), encoding="utf-8")
