"""Prose uses the field's words: pages, comments, docstrings and messages have none of the phrases listed here."""

import functools
import io
import pathlib
import re
import tokenize

import pytest

pytestmark = pytest.mark.neutral

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("keras_shardopt", "docs", "tests", "examples", "benchmarks")
# A pattern, and what to write.
INSTEAD_OF = {
    r"(loops?|steps?|stages?|functions?|classe?s?|means?|`\w+`) of (your|one's) own": "a custom training loop, ...",
    r"unequal (parts?|shares?)": "uneven batches",
    r"\b(float32|the|of|their) masters\b": "master weights",
    r"\bas ever\b": "as usual",
    r"\bmicro-steps?\b": "micro-batch",
    r"\b(the|a) chief\b": "rank 0, or process 0",
    r"\b(loops?|written) by hand\b|hand-written loop": "a custom training loop",
    r"\b(must|cannot|may) meet\b|\bmeeting of\b": "communicate, start, join; a collective",
    r"\b(it|they|ranks?|processes|tensor|parameter|zeros|optimizer)( (does|do|can))?( not)? tells?\b": "show, say",
    r"\btells? (each other|apart|how|of)\b": "exchange, distinguish, show",
    r"\b(optimizer|schedule|ranks?|layer|Keras) wants?\b": "needs, asks for",
    r"\b(decides?|decided) alike\b": "make the same decision",
    r"\bcosts its window\b|\bup to you:": "discards its window; say who must do it",
    r"\bwith one meaning\b|\bhad never come\b": "with the same result; as if the batch had been left out",
    r"\bsomebody must\b|\bnobody can tell\b": "say who",
    r"\b(left|leaves?|it|alone it|replica|process|optimizer) alone\b": "unchanged, by itself, only",
    r"\bbeside\b": "next to, in addition to, with",
    r"\b(ranks|processes|replicas) (meet|met)\b": "a barrier; communicate; wait for each other",
    r"\bgo(es)? along\b": "takes part",
    r"\b(verdict|culprit)s?\b": "found_inf, nonfinite_source",
    r"\bits own affair\b": "per-rank",
    r"\bof which no row counts\b": "whose rows are not counted",
}


def prose(path):
    """The text of a page; of a program its comments, and strings with a space in them. With the numbers of lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(enumerate(text.splitlines(), 1))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            found += enumerate(token.string.splitlines(), token.start[0])
    return found


@functools.cache
def everything():
    """All prose of the repository: file, number of the line, and the line."""
    pages = list(ROOT.glob("*.md"))
    inside = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".md", ".py")]
    read = [path for path in [*pages, *inside] if path != pathlib.Path(__file__) and "results" not in path.parts]
    return [(path.relative_to(ROOT), number, line) for path in read for number, line in prose(path)]


@pytest.mark.parametrize("pattern", INSTEAD_OF)
def test_no_prose_has_a_phrase_for_which_the_field_has_a_word(pattern):
    found = [
        f"{path}, line {number}: {line.strip()}"
        for path, number, line in everything()
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, f"write {INSTEAD_OF[pattern]}:\n" + "\n".join(found)


def test_phrases_are_found_in_what_people_read(tmp_path):
    program = tmp_path / "program.py"
    program.write_text('masters = "masters"  # the masters\ndef f():\n    """One.\n\n    The chief writes.\n    """\n')
    assert [number for number, line in prose(program) if re.search(r"masters|chief", line)] == [1, 5]
