"""Prose has the habits of well-edited packages: no more of each per 1,000 words than the most in six of them.

Docstrings and comments of Python files count, and the text of pages outside code. The limits are the highest rates of
einops, optimistix, FSDP2, Fabric, keras-rs and optax, rounded up.
"""

import ast
import io
import pathlib
import re
import tokenize

import pytest

pytestmark = pytest.mark.neutral

ROOT = pathlib.Path(__file__).parents[2]
# By habit: a pattern, and the most per 1,000 words.
LIMITS = {
    "what as a noun clause": (r"\b[Ww]hat\b(?! is)", 1.0),
    "opens with What, Whose, Which, Of, As": (r"^\s*(What|Whose|Which|Of|With which|By what|To what|As)\b", 0.2),
    "opens with Where, Within, Not": (r"^\s*(Where|Within|Not)\b", 0.2),
    "opens with Lets": (r"^\s*Lets\b", 0.1),
    "where for if or when": (r"\b[Ww]here\b", 2.2),
    "software that sees, knows, says, asks": (
        r"\b(sees?|looks?|knows?|known|says?|said|tells?|told|asks?|asked|wants?|notices?|heard|hears?|learns?)\b",
        2.5,
    ),
    "of which, in which, with whom": (
        r"\b(of|in|with|by|from|to|on|for|at|around|after|through|over) (which|whom|whose|what)\b",
        1.6,
    ),
    "a trailing which or whose": (r", (which|whose|who)\b", 1.6),
    "is said, is left, is given": (
        r"\b(is|are|was|were|be) (said|noted|shown|given|left|put|taken|told|seen|let)\b",
        0.5,
    ),
    "of its own, by itself": (r"\b(of (its|their|his|one|your|her) own|by (itself|themselves))\b", 0.3),
    "there is": (r"\bthere (is|are|was|were)\b", 1.0),
    "somebody, nobody": (r"\b(some(body|one)|no(body| one)|whoever|any(body|one)|everybody)\b", 0.1),
    "goes on": (r"\b(goes|go|going|went) on\b", 0.2),
    "so that": (r"\bso that\b", 0.8),
    "last digits, equal bits": (r"\b(last digits?|equal bits|same bits)\b", 0.3),
    "refuses": (r"\brefus(e|es|ed|ing)\b", 0.3),
    "else for otherwise": (r"(\belse (it|they|the|each|a)\b|[;,] else\b)", 0.1),
}


def python_texts(source):
    """The docstrings and comments of a program, without code in them."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield re.sub(r"```.*?```|>>>.*|`[^`]*`", " X ", value.value, flags=re.DOTALL)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def page_texts(source):
    """The paragraphs of a page, without code in them."""
    code = r"<!--.*?-->|<svg.*?</svg>|```.*?```|`[^`]*`"
    yield from re.split(r"\n\s*\n", re.sub(code, " X ", source, flags=re.DOTALL))


def rates(texts):
    """How often each habit occurs per 1,000 words."""
    found = [re.sub(r"\s+", " ", text) for text in texts]
    num_words = sum(len(text.split()) for text in found)
    assert num_words
    count = {habit: sum(len(re.findall(pattern, t)) for t in found) for habit, (pattern, _) in LIMITS.items()}
    return {habit: 1000 * number / num_words for habit, number in count.items()}


def over_limits(texts):
    return {habit: round(rate, 2) for habit, rate in rates(texts).items() if rate > LIMITS[habit][1]}


def texts_in(folder, suffix, read):
    paths = [ROOT / folder] if suffix in folder else sorted((ROOT / folder).rglob(f"*{suffix}"))
    return [text for path in paths for text in read(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("folder", "suffix", "read"),
    [
        ("keras_shardopt", ".py", python_texts),
        ("docs", ".md", page_texts),
        ("README.md", ".md", page_texts),
        ("CONTRIBUTING.md", ".md", page_texts),
    ],
)
def test_no_habit_is_above_its_limit(folder, suffix, read):
    assert not over_limits(texts_in(folder, suffix, read))


def test_habits_are_found_in_what_people_read():
    docstring = '"""Lets go on, `what` aside; nobody sees it."""'
    program = f'told = "what"  # what it told\ndef f():\n    {docstring}\n'
    found = rates(python_texts(program))
    named = {habit for habit, rate in found.items() if rate}
    assert named == {
        "what as a noun clause",
        "software that sees, knows, says, asks",
        "opens with Lets",
        "goes on",
        "somebody, nobody",
    }
    assert found["software that sees, knows, says, asks"] == pytest.approx(1000 * 2 / 11)
    assert over_limits(page_texts("Where it is.\n\n```\nwhat\n```\n")).keys() == {
        "opens with Where, Within, Not",
        "where for if or when",
    }
