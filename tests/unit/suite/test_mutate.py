"""The tool that plants random changes: what it changes, and which tests it chooses."""

import ast
import json
import random
import sys

import pytest
from support import launch

sys.path.insert(0, str(launch.TESTS / "tools"))
import mutate

pytestmark = pytest.mark.neutral

SOURCE = '''
def f(a, b: int = 3) -> int:
    """Not changed."""
    if a.ready and not b:
        f(a + 1, b)
    a.total += 2
    if a == b:
        raise ValueError(f"{a + 1}")
'''


def test_operators_constants_conditions_and_statements_are_changed():
    made = [(ast.unparse(nodes[-1]), new) for nodes, new in mutate.changes(ast.parse(SOURCE))]
    assert sorted(made) == sorted(
        [
            ("3", "4"),
            ("a.ready and (not b)", "(a.ready or not b)"),
            ("not b", "(b)"),
            ("f(a + 1, b)", "pass"),
            ("a + 1", "(a - 1)"),
            ("1", "2"),
            ("a.total += 2", "pass"),
            ("2", "3"),
            ("a == b", "(a != b)"),
        ]
    )


def test_each_change_is_another_program():
    for file in random.Random(0).sample(sorted(mutate.PACKAGE.rglob("*.py")), 8):
        source = file.read_text()
        made = list(mutate.changes(ast.parse(source)))
        for nodes, new in random.Random(1).sample(made, min(9, len(made))):
            changed = mutate.changed(source, nodes[-1], new)
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), (file, new)


def test_of_each_file_that_executes_a_line_the_smallest_test_comes_first(tmp_path):
    (tmp_path / "torch").mkdir()
    lines = [
        ("tests/a.py::large", [4, 5, 6, 7]),
        ("tests/a.py::small", [5]),
        ("tests/b.py::middle", [4, 5, 6]),
        ("tests/b.py::other", [8]),
        ("tests/c_ranks.py::one of many", [5, 6, 7, 8, 9]),
    ]
    text = "\n".join(json.dumps([test, {"x.py": numbers}]) for test, numbers in lines)
    (tmp_path / "torch" / "1.jsonl").write_text(text + "\n")
    nodes = next(nodes for nodes, new in mutate.changes(ast.parse(SOURCE)) if new == "(a - 1)")
    found = mutate.tests_of(tmp_path, "torch", "x.py", nodes)
    assert found == ["tests/a.py::small", "tests/b.py::middle", "tests/c_ranks.py", "tests/a.py::large"]
