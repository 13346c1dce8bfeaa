"""The README as a package index shows it: relative links, which break there, become the names of the files."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_an_index(text: str) -> str:
    """Markdown without pictures and links that need the repository."""
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)", r"\1 (`\2`)", text)


class Readme(MetadataHookInterface):
    """Puts the text in the place of the file."""

    def update(self, metadata: dict) -> None:
        """Called by hatchling, with the table `[project]`."""
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text)}
