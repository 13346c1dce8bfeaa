"""The code blocks of the README and of the pages under docs/."""

from __future__ import annotations

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
BACKENDS = ("jax", "tensorflow", "torch")

_BLOCK = re.compile(r"(?:^<!-- ([^>]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKS = ("backends", "not run", "file", "starts", "command")


@dataclasses.dataclass(frozen=True)
class Block:
    """What stands between two fences.

    A comment right above it, `<!-- mark: value -->`, says more: `backends` that it is for (else all), `not run` and
    why, the name of the `file` that it is, the backend whose processes it `starts`. A diff stands for its new side.
    """

    page: pathlib.Path
    line: int
    language: str
    code: str
    mark: str
    value: str

    def runs_on(self, backend: str) -> bool:
        """Whether it is a piece of Python to run as it stands."""
        if self.language != "python" or self.mark in ("not run", "file") or self.code.startswith("--8<--"):
            return False
        return self.mark != "backends" or backend in self.value.split(", ")


def blocks(page: pathlib.Path) -> list[Block]:
    """All of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        comment, language, code = match.groups()
        mark, _, value = (comment or "").partition(": ")
        line = text.count("\n", 0, match.start(3)) + 1
        if language == "diff":
            new = [text[2:] or "\n" for text in code.splitlines(keepends=True) if not text.startswith("-")]
            language, code = "python", "".join(new)
        if comment is not None:
            assert mark in _MARKS and value, f"{page}, line {line}: {comment}"
        if mark == "backends":
            assert set(value.split(", ")) < set(BACKENDS), f"{page}, line {line}: {comment}"
        found.append(Block(page, line, language, code, mark, value))
    assert text.count("\n```") % 2 == 0 and len(found) == text.count("\n```") // 2, f"{page}: fences do not match"
    return found
