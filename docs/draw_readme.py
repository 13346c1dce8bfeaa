"""Draws the picture of the README, docs/images/readme.svg, from the newest files in benchmarks/results/.

python docs/draw_readme.py
"""

from __future__ import annotations

import json
import pathlib

DOCS = pathlib.Path(__file__).parent
PICTURE = DOCS / "images" / "readme.svg"
RESULTS = DOCS.parent / "benchmarks" / "results"

PANELS = {
    "One step of fit on 2 PyTorch ranks (ms)": (
        "A step of fit on 2 ranks of PyTorch, 6 x Dense(1024), 64 rows",
        {
            "hand-written DDP loop, Adam": "DDP + torch.optim.Adam",
            "hand-written DDP loop, fused Adam": "DDP + torch.optim.Adam(fused=True)",
            "model.fit, CrossShard(Adam())": "fit, CrossShard(Adam)",
        },
    ),
    "One Adam update of 16.8 million weights on PyTorch (ms)": (
        "Updates of 16.8 million parameters on PyTorch",
        {
            "keras.optimizers.Adam": "Keras Adam",
            "torch.optim.Adam(fused=True)": "torch.optim.Adam(fused=True)",
            "CrossShard(keras.optimizers.Adam())": "CrossShard Adam",
        },
    ),
}
WIDTH, LABELS, BARS, ROW = 760, 270, 400, 26
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } rect { fill: #b3bac2 }
.ours { fill: #2f6fde } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #6e7681 }
.ours { fill: #58a6ff } }"""


def milliseconds(title: str) -> dict[str, float]:
    """The medians of the newest run of that title."""
    runs = [
        json.loads(line)
        for file in RESULTS.glob("*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    newest = max(
        (run for run in runs if run.get("title") == title), key=lambda run: run["date"]
    )
    tables = [part for part in newest["parts"] if isinstance(part, dict)]
    return {row[0]: float(row[1]) for table in tables for row in table["rows"]}


def picture() -> str:
    """The picture, as SVG."""
    shapes, top = [], 4
    for title, (name, rows) in PANELS.items():
        times = milliseconds(name)
        longest = max(times[row] for row in rows.values())
        top += ROW
        shapes.append(f'<text class="title" x="0" y="{top - 8}">{title}</text>')
        for label, row in rows.items():
            length = BARS * times[row] / longest
            kind = ' class="ours"' if "CrossShard" in row else ""
            shapes += [
                f'<text x="{LABELS - 10}" y="{top + 16}" text-anchor="end">{label}</text>',
                f'<rect{kind} x="{LABELS}" y="{top + 3}" width="{length:.1f}" height="{ROW - 8}" rx="2"/>',
                f'<text x="{LABELS + length + 8:.1f}" y="{top + 16}">{times[row]:.0f}</text>',
            ]
            top += ROW
        top += 12
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([start, f"<style>{STYLE}</style>", *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
