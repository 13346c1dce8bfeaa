"""Draws the rooms of the package and which imports which, into CONTRIBUTING.md.

    python docs/draw_house.py [--check]

The drawing is made from the imports themselves. An arrow that others imply (a room imports a second, and both a third)
is left out. With `--check` nothing is written, and the exit status says whether the drawing is up to date.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "keras_shardopt"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- drawn by docs/draw_house.py -->", "<!-- end of the drawing -->"
# Of these every room may import something.
GROUND = {"arguments", "numerics"}


def room_of(parts: tuple[str, ...]) -> str | None:
    """The room of a module below the package; None for the package itself and for the ground."""
    name = parts[0].removesuffix(".py") if parts else "__init__"
    return None if name in ("__init__", "__main__") or name in GROUND else name


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        here = room_of(file.relative_to(PACKAGE).parts)
        if here is None:
            continue
        targets = found.setdefault(here, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == PACKAGE.name
            ):
                for alias in node.names:
                    there = room_of(tuple(f"{node.module}.{alias.name}".split(".")[1:]))
                    targets |= (
                        {there} - {None, here} if (PACKAGE / str(there)).is_dir() else set()
                    )
    return found


def reached(graph: dict[str, set[str]], room: str) -> set[str]:
    """All rooms below one."""
    return set().union(*[{target} | reached(graph, target) for target in graph[room]])


def drawing() -> str:
    """The drawing, as a block of Mermaid."""
    graph = arrows()
    lines = [
        f"    {room} --> {target}"
        for room in sorted(graph)
        for target in sorted(graph[room])
        if not any(target in reached(graph, other) for other in graph[room] - {target})
    ]
    return "\n".join([BEGIN, "```mermaid", "graph TD", *lines, "```", END])


def main() -> None:
    """Writes the drawing, or checks it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text(encoding="utf-8")
    drawn = re.sub(f"{BEGIN}.*?{END}", lambda _: drawing(), page, flags=re.DOTALL)
    if parser.parse_args().check:
        sys.exit(
            f"{PAGE.name} is out of date: run `python docs/draw_house.py`"
            if drawn != page
            else 0
        )
    PAGE.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
