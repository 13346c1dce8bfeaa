"""Builds one API page per class or function. Each page docs/api/*/index.md lists some, and links to them.

An entry is `::: name`, with options of mkdocstrings below it. mkdocs calls the hooks.
"""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
ENTRY = re.compile(r"^::: (keras_shardopt\.[\w.]+)\n((?: .*\n)*)", re.MULTILINE)
PAGE = """---
title: {title}
---

::: {name}
    options:
      heading: {title}
      heading_level: 1
{options}"""


def title(name: str) -> str:
    """The name as users write it, or the last part of a name that they do not import."""
    short = name.removeprefix("keras_shardopt.")
    return short if short.count(".") < 2 else short.rpartition(".")[2]


def address(name: str) -> str:
    """The page of a name."""
    return f"api/{title(name)}.md"


def entries(family: str) -> list[tuple[str, str]]:
    """Names and options in the source of a page."""
    return ENTRY.findall((ROOT / "docs" / family).read_text(encoding="utf-8"))


@functools.cache
def package() -> Any:
    """The package as griffe reads it."""
    return griffe.load("keras_shardopt", search_paths=[ROOT])


def summary(name: str) -> str:
    """The first paragraph of a docstring."""
    text = package()[name.removeprefix("keras_shardopt.")].docstring.value
    return " ".join(text.split("\n\n")[0].split())


def on_config(config: Any) -> Any:
    """Puts the pages of a family below it in the navigation."""
    for group in config.nav:
        for pages in group.values():
            for entry in pages:
                ((family, page),) = entry.items()
                if page.startswith("api/"):
                    below = [
                        {name.rpartition(".")[2]: address(name)}
                        for name, _ in entries(page)
                    ]
                    entry[family] = [page, *below]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages."""
    families = sorted(file.src_uri for file in files if file.src_uri.startswith("api/"))
    for name, options in (entry for family in families for entry in entries(family)):
        options = options.removeprefix("    options:\n")
        text = PAGE.format(title=title(name), name=name, options=options)
        files.append(File.generated(config, address(name), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the entries of a family by links with summaries."""
    if page.file.generated_by is not None:
        return markdown

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"- [`{title(name)}`](../{title(name)}.md): {summary(name)}\n"

    return ENTRY.sub(link, re.sub(r"(?<=\n)\n(?=::: )", "", markdown))


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Raises an error if the page lacks a member that its entry lists."""
    if page.file.generated_by is not None:
        listed = re.findall(r"^ +members: \[(.*)\]$", page.markdown, re.MULTILINE)
        for member in ", ".join(listed).split(", ") if listed else []:
            if f'.{member}"' not in content:
                raise PluginError(f"{page.file.src_uri} has no `{member}`")
    return content
