"""Builds the page of all messages: every error and warning of the package, read from its sources, under its subject.

mkdocs calls `on_files`. The sign "…" stands for a value at run time.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import pathlib
import re
from typing import Any

PACKAGE = pathlib.Path(__file__).parents[1] / "keras_shardopt"
GAP = "…"
MADE = r"Error$|^warn(_user)?$|_warn_once$"  # calls that make a message

# Files begin with this; headings of the page, in its order; and the page to read.
SUBJECTS = (
    (
        "Starting processes and replicas",
        "processes.md",
        r"__init__|fit/scope|backends/((\w+/)?process|jobs)|update/agreement",
    ),
    ("Preparing models, and `fit`", "uneven_batches.md", r"fit/|update/losses"),
    ("Data", "processes.md#data", r"data/"),
    ("Sharded state", "sharded_state.md", r"sharding/"),
    ("Saving and checkpoints", "saving.md", r"checkpoint/|wrapping/(stored|attributes)"),
    ("Callbacks and summaries", "saving.md#callbacks", r"callbacks/|classic/summaries/"),
    (
        "Half precision and loss scaling",
        "loss_scaling.md",
        r"optimizers/(loss_|scale_|mixed|auto)",
    ),
    ("Schedules", "schedules.md", r"schedules/"),
    ("Towers", "accumulation.md#towers", r"classic/tower"),
    (
        "`build_optimizer` and `optimize_loss`",
        "summaries.md",
        r"classic/(steps/|build|tf1)",
    ),
    ("Accumulation", "accumulation.md", r"update/(accumulation|gradient_sums)"),
    ("Local SGD", "local_sgd.md", r"extensions/local_sgd"),
    ("Virtual replicas", "randomness.md", r"extensions/equal_bits"),
    (
        "Reducing gradients",
        "reduction.md",
        r"backends/|kernels/|update/|extensions/coding|optimizers/cross",
    ),
    ("Optimizers and wrappers", "order.md", r"wrapping/|optimizers/|classic/"),
    ("Arguments", "how_to_choose.md", r""),
)


@dataclasses.dataclass(frozen=True)
class Message:
    """An error or warning of the package.

    Args:
        kind: the exception, or "warning".
        text: with "…" for values at run time.
        file: the file that raises it, relative to the package.
    """

    kind: str
    text: str
    file: str

    @property
    def code(self) -> str:
        """The anchor on the page: it changes with the text only."""
        return "m" + hashlib.sha1(self.text.encode()).hexdigest()[:6]

    @property
    def title(self) -> str:
        """Its first words: those of the second sentence, too, if gaps leave only a few."""
        text = re.sub(rf"\w*{GAP}\w*", GAP, self.text)
        sentences = re.split(r"(?<=[.:]) ", text)
        words = sentences.pop(0).split()
        while sentences and sum(word != GAP for word in words) < 4:
            words += sentences.pop(0).split()
        title = " ".join(words[:9]).rstrip(" .:,;") + ("" if len(words) <= 9 else f" {GAP}")
        return title + "`" * (title.count("`") % 2)

    def matches(self, message: str) -> bool:
        """Whether a printed text comes from this message."""
        parts = [re.escape(part) for part in self.text.split(GAP)]
        return re.fullmatch(".*?".join(parts), message, re.DOTALL) is not None


class _Reader:
    """Finds the texts of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.busy: set[int] = set()
        self.functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }

    def messages(self) -> list[tuple[str, ast.expr, str | None]]:
        """Kind, expression and text of each; None if another file builds the text."""
        return self._in(self.tree, self.tree)

    def _in(self, node: ast.AST, scope: ast.AST) -> list[tuple[str, ast.expr, str | None]]:
        found = []
        for child in ast.iter_child_nodes(node):
            inside = child if isinstance(child, ast.FunctionDef) else scope
            found += self._in(child, inside)
            if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
                found.append(self._of(child.exc, scope))
            elif isinstance(child, ast.Call) and re.search(MADE, ast.unparse(child.func)):
                found.append(self._of(child, scope))
        return found

    def _of(self, call: ast.Call, scope: ast.AST) -> tuple[str, ast.expr, str | None]:
        name = ast.unparse(call.func)
        kind = "warning" if "warn" in name else name if name.endswith("Error") else "Error"
        text = self.text(call.args[0], scope, {}) if call.args else ""
        return (
            kind,
            call,
            text if text == "" or re.search(r"[a-z]{3}", text or "") else None,
        )

    def constants(self) -> list[str]:
        """Messages that the file keeps in constants."""
        values = [node.value for node in self.tree.body if isinstance(node, ast.Assign)]
        texts = [self.text(value, self.tree, {}) or "" for value in values]
        return [text for text in texts if re.search(r"[a-z]\. ", text) and len(text) > 60]

    def text(self, node: ast.expr, scope: ast.AST, given: dict[str, Any]) -> str | None:
        """The text of an expression, with gaps; None without any text."""
        if id(node) in self.busy:  # it is made of itself
            return None
        self.busy.add(id(node))
        try:
            return self._text(node, scope, given)
        finally:
            self.busy.remove(id(node))

    def _text(self, node: ast.expr, scope: ast.AST, given: dict[str, Any]) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, scope, given) or GAP for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value, scope, given)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [self.text(part, scope, given) for part in (node.left, node.right)]
            return "".join(part or GAP for part in parts) if any(parts) else None
        if isinstance(node, ast.BoolOp | ast.IfExp):
            either = (
                node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            )
            return next(
                filter(None, (self.text(part, scope, given) for part in either)), None
            )
        if isinstance(node, ast.Call):
            return self._returned(node, scope, given)
        if isinstance(node, ast.Name):
            return self._assigned(node.id, scope, given)
        return None

    def _returned(
        self, call: ast.Call, scope: ast.AST, given: dict[str, Any]
    ) -> str | None:
        function = self.functions.get(ast.unparse(call.func).rpartition(".")[2])
        returns = (
            [n for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
        )
        if function is None or not returns or returns[-1].value is None:
            return None
        names = [argument.arg for argument in function.args.args]
        texts = {
            name: self.text(value, scope, given) for name, value in zip(names, call.args)
        }
        known = {
            name: ast.Constant(text) for name, text in texts.items() if text is not None
        }
        return self.text(returns[-1].value, function, known)

    def _assigned(self, name: str, scope: ast.AST, given: dict[str, Any]) -> str | None:
        if name in given:
            return self.text(given[name], scope, {})
        if isinstance(scope, ast.FunctionDef):
            if name in (argument.arg for argument in scope.args.args):
                return None
            places = [(scope, list(ast.walk(scope))), (self.tree, self.tree.body)]
        else:
            places = [(self.tree, self.tree.body)]
        for where, nodes in places:
            for node in nodes:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    return self.text(node.value, where, {})
        return None


def read(package: pathlib.Path = PACKAGE) -> tuple[list[Message], list[str]]:
    """All messages, and the calls with a text from another file: files and expressions."""
    found: dict[str, Message] = {}
    elsewhere, kept = [], []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        reader = _Reader(ast.parse(path.read_text(encoding="utf-8")))
        for kind, call, text in reader.messages():
            if text is None:
                elsewhere.append(f"{file}: {ast.unparse(call)}")
            elif text and not _short(text).startswith(
                f"{GAP}. "
            ):  # else a constant is its beginning
                found.setdefault(_short(text), Message(kind, _short(text), file))
        kept += [
            Message("Error or warning", _short(text), file) for text in reader.constants()
        ]
    for message in kept:
        if not any(message.text.removesuffix(GAP) in text for text in found):
            found[message.text] = message
    return list(found.values()), elsewhere


def _short(text: str) -> str:
    return re.sub(rf"{GAP}[{GAP} ]*{GAP}", GAP, " ".join(text.replace("{}", GAP).split()))


def page() -> str:
    """The page, in Markdown."""
    messages, _ = read()
    lines = [
        "---\nhide: [toc]\nsearch:\n  boost: 0.7\n---\n",
        "# All messages\n",
        f"All {len(messages)} errors and warnings of the package, read from its sources. Paste a message into the search "
        "field above, or search for its first words. The sign … stands for a value of your program. A message begins with "
        "the broken rule and ends with the fix. For symptoms without a message, read "
        "[Troubleshooting](troubleshooting.md).\n",
    ]
    left = messages
    for title, link, files in SUBJECTS:
        here = [m for m in left if re.match(files, m.file)]
        left = [m for m in left if m not in here]
        lines.append(f"## {title}\n\n[More about it]({link})\n")
        for message in sorted(here, key=lambda m: m.text):
            lines.append(f"### {_escaped(message.title)} {{ #{message.code} }}\n")
            shown = re.sub(rf"\w*{GAP}\w*", GAP, message.text)
            lines.append(f"{message.kind}: {_escaped(shown)}\n")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text as Markdown: names stay code, all other signs are literal."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_\[\]<>{}#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Adds the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "messages.md", content=page()))
    return files
