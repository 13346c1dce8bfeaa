"""Hooks of mkdocs: tutorials become pages, formulas become MathML, and pages load nothing from a network.

A tutorial is a script with `# %%` cells, under examples/tutorials/. Cells marked `[markdown]` are its prose.
"""

from __future__ import annotations

import html
import pathlib
import re
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

TUTORIALS = pathlib.Path(__file__).parents[1] / "examples" / "tutorials"


def as_markdown(script: str) -> str:
    """A script with `# %%` cells as a page."""
    parts = []
    for kind, cell in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", script, re.MULTILINE):
        if "[markdown]" in kind:
            parts.append(re.sub(r"^# ?", "", cell, flags=re.MULTILINE).strip())
        else:
            parts.append(f"```python\n{cell.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each tutorial."""
    for script in sorted(TUTORIALS.glob("*.py")):
        page = as_markdown(script.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"tutorials/{script.stem}.md", content=page))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Sets formulas as MathML, and lets code in tables and descriptions of arguments look well."""
    return _formulas(_types_once(_breakable(content)))


def _breakable(content: str) -> str:
    """Code in tables may break after a dot, a comma and the like, rather than inside a word."""

    def broken(match: re.Match[str]) -> str:
        code = re.sub(r"([.(,=])(?=[a-zA-Z&])", r"\1<wbr>", match[1])
        return "<code>" + code.replace("_", '_<wbr class="narrow">') + "</code>"

    def cell(match: re.Match[str]) -> str:
        return re.sub(r"<code>([^<]*)</code>", broken, match[0])

    return re.sub(r"<td.*?</td>", cell, content, flags=re.DOTALL)


def _types_once(content: str) -> str:
    """Types and defaults of arguments stand in the signature above, and again in their texts."""
    item = r'(<li class="doc-section-item field-body">\s*<b><code>[^<]*</code></b>)\s*\(.*?\)\s*\u2013(?=\s*<div)'
    return re.sub(item, r"\1:", content, flags=re.DOTALL)


def _formulas(content: str) -> str:
    """MathML, which browsers show without a script."""

    def formula(match: re.Match[str]) -> str:
        latex = html.unescape(match[2])
        display = "block" if latex.startswith("\\[") else "inline"
        return latex2mathml.converter.convert(latex[2:-2], display=display)

    pattern = r'<(span|div) class="arithmatex">(\\[(\[].*?\\[)\]])</\1>'
    return re.sub(pattern, formula, content, flags=re.DOTALL)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Raises an error for a page that needs a network."""
    loaded = r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//[^>]*>|<link[^>]*\srel=\"?stylesheet[^>]*https?:[^>]*>"
    found = [
        *re.findall(loaded, output),
        *re.findall(r'class="(?:mermaid|arithmatex)"', output),
    ]
    if found:
        raise PluginError(f"{page.file.src_uri} is not whole without a network: {found}")
    return output
