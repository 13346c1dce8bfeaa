"""Plants random changes in the package, one at a time, and runs the tests that execute the changed line.

    python tests/tools/mutate.py record build/lines
    python tests/tools/mutate.py plant build/lines keras_shardopt/update --changes 30 --seed 1

`record` runs the default tests on each backend and keeps which test executes which lines (Python 3.12). `plant` changes
an operator, a constant or a condition, or leaves a statement out, in a copy of the package. It runs tests that execute
the line, first those that execute least else, until one fails. It prints `died`, `survived`, or `not run` (no test
executes the line) for each change, and the counts at the end. `--only 3 7` repeats the changes of these numbers.
"""

import argparse
import ast
import collections
import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support import launch

ROOT = launch.TESTS.parent
PACKAGE = ROOT / "keras_shardopt"
BACKENDS = ("torch", "jax", "tensorflow")
MOST_TESTS, SECONDS = 60, 400  # for each change and backend
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


def record(folder, arguments):
    for backend in BACKENDS:
        shutil.rmtree(folder / backend, ignore_errors=True)
        (folder / backend).mkdir(parents=True)
        (folder / "sitecustomize.py").write_text("import executed_lines\n")  # every Python process imports this file
        environment = {
            **os.environ,
            "KERAS_BACKEND": backend,
            "PACKAGE_TO_RECORD": str(PACKAGE),
            "RECORD_LINES_TO": str(folder / backend),
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests" / "tools"), str(ROOT)]),
        }
        command = [sys.executable, "-m", "pytest", "-p", "executed_lines", "-n", "2", "--dist", "loadgroup"]
        subprocess.run([*command, *arguments], env=environment, cwd=ROOT)


@functools.cache
def executed(folder, backend):
    """By file and line the tests that execute it, and by test the number of lines that it executes."""
    by_line, size = collections.defaultdict(lambda: collections.defaultdict(set)), collections.Counter()
    for path in sorted((folder / backend).glob("*.jsonl")):
        for test, by_file in map(json.loads, path.read_text().splitlines()):
            if "_ranks.py" in test:  # one start of ranks for all tests of the file
                test = test.partition("::")[0]
            if test.startswith("tests/"):
                size[test] += sum(map(len, by_file.values()))
                for file, lines in by_file.items():
                    for line in lines:
                        by_line[file][line].add(test)
    return by_line, size


def changes(node, around=(), is_condition=False):
    """All changes of a syntax tree: the nodes around each one, outermost first, and itself; and its new text."""
    around = (*around, node) if hasattr(node, "lineno") else around
    yield from ((around, new) for new in replacements(node, is_condition))
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            stays = isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr)) or name in ("annotation", "returns")
            if isinstance(child, ast.AST) and not stays:
                yield from changes(child, around, name == "test")


def replacements(node, is_condition):
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        yield f"({ast.unparse(ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)):
        yield "pass"
    elif isinstance(node, (ast.Name, ast.Attribute, ast.Call)) and is_condition:
        yield f"(not {ast.unparse(node)})"


def changed(source, node, new):
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + new.encode() + after).decode()


def tests_of(folder, backend, file, nodes):
    """Those that execute a line of the node, or else of what is around it in its function, in the order to run them.

    One test of each file, then the next of each; those first that execute fewest lines, because they look most closely.
    """
    by_line, size = executed(folder, backend)
    for node in reversed(nodes):
        found = set().union(*(by_line[file].get(line, ()) for line in range(node.lineno, node.end_lineno + 1)))
        if found or isinstance(node, ast.FunctionDef):
            break
    by_file = collections.defaultdict(list)
    for test in sorted(found, key=lambda test: (size[test], test)):
        by_file[test.partition("::")[0]].append(test)
    return [test for each in itertools.zip_longest(*by_file.values()) for test in each if test][:MOST_TESTS]


def plant(folder, file, nodes, new):
    """What became of a change, with the test that saw it or the number of those that did not."""
    ran = []
    for backend in BACKENDS:
        tests = tests_of(folder, backend, str(file), nodes)
        if not tests:
            continue
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(PACKAGE, f"{copy}/keras_shardopt", ignore=shutil.ignore_patterns("__pycache__"))
            path = pathlib.Path(copy, "keras_shardopt", file)
            path.write_text(changed(path.read_text(), nodes[-1], new))
            program = [sys.executable, str(ROOT / "tests/unit/test_planted_faults.py"), copy, f"{copy}/outcome.json"]
            environment = launch.variables(backend, OMP_NUM_THREADS="1")
            environment["PYTHONPATH"] = os.pathsep.join([copy, environment["PYTHONPATH"]])
            try:
                launch.run([*program, "-x", *tests], SECONDS, environment)
            except launch.WorkersFailed as failure:
                if str(failure).startswith("not finished"):
                    ran.append(f"{backend}: more than {SECONDS} s")
                    continue
            outcome = pathlib.Path(copy, "outcome.json")
            found = json.loads(outcome.read_text()) if outcome.exists() else {"failed": [], "passed": []}
        if found["failed"] or not found["passed"]:
            return f"died      ({backend}: {' '.join(found['failed']) or 'no test could run'})"
        ran.append(f"{backend}: {len(found['passed'])} tests")
    return f"survived  ({', '.join(ran)})" if ran else "not run"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "plant"])
    parser.add_argument("folder", type=lambda text: pathlib.Path(text).resolve(), help="for what `record` finds")
    parser.add_argument("paths", nargs="*", help="files and folders; or, after `--`, pytest arguments")
    parser.add_argument("--changes", type=int, default=30, help="drawn from all that can be made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", type=int, help="numbers of changes; all by default")
    given = parser.parse_args()
    if given.what == "record":
        return record(given.folder, given.paths)
    paths = [pathlib.Path(path).resolve() for path in given.paths]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    possible = [(file.relative_to(PACKAGE), *each) for file in files for each in changes(ast.parse(file.read_text()))]
    drawn = random.Random(given.seed).sample(possible, min(given.changes, len(possible)))

    def planted(number):
        file, nodes, new = drawn[number]
        became = plant(given.folder, file, nodes, new)
        old = ast.unparse(nodes[-1]).splitlines()[0]
        print(f"{number:3} {became}\n    {file}:{nodes[-1].lineno}: {old!r} as {new!r}", flush=True)
        return became.split()[0]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        counts = collections.Counter(pool.map(planted, given.only or range(len(drawn))))
    print(", ".join(f"{count} {what}" for what, count in counts.items()))


if __name__ == "__main__":
    main()
