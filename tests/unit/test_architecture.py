"""The layout holds: who may import a framework, who may ask for the backend, and imports go round in no circle."""

import ast
import functools
import pathlib

import pytest

import keras_shardopt

PACKAGE = pathlib.Path(keras_shardopt.__file__).parent
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}
FRAMEWORKS = {"tensorflow", "jax", "jaxlib", "torch", "flax", "optax"}
# From the top down. A room imports from itself and from those below.
ROOMS = [
    "keras_shardopt",
    "callbacks",
    "steps",
    "fit",
    "checkpoint",
    "summaries",
    "optimizers",
    "schedules",
    "sharding",
    "update",
    "wrapping",
    "data",
    "backends",
    "numerics",
    "arguments",
]

SOURCES = {name: file.read_text() for name, file in MODULES.items()}


@functools.cache
def nodes(source):
    return list(ast.walk(ast.parse(source)))


def imports(source):
    """Every module that a source text imports, at any depth, with the names taken from it."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield node.module, alias.name


def frameworks_of(source):
    return {module.split(".")[0] for module, _ in imports(source)} & FRAMEWORKS


def may_import(name):
    """A file or folder named after a framework may import that one."""
    return {"jax", "jaxlib"} if "jax" in name.split(".") else FRAMEWORKS & set(name.split("."))


def asks_for_the_backend(source):
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backend"
        for node in nodes(source)
    ) or any(name == "backend" and module.startswith("keras") for module, name in imports(source))


def modules_imported(source):
    """The modules of the package that a source text imports."""
    return {f"{m}.{n}" if f"{m}.{n}" in MODULES else m for m, n in imports(source) if m.startswith("keras_shardopt")}


def circles(graph):
    """The modules on circles of a graph `{module: those that it imports}`."""
    left = {name: set(targets) & set(graph) for name, targets in graph.items()}
    while loose := {name for name, targets in left.items() if not targets}:
        left = {name: targets - loose for name, targets in left.items() if name not in loose}
    return sorted(left)


def room(module):
    top = ("keras_shardopt", "keras_shardopt.__main__")
    return "keras_shardopt" if module in top else module.split(".")[1]


def upwards(name, source):
    """The modules that `name` imports although their rooms are above its own."""
    return {m for m in modules_imported(source) if ROOMS.index(room(m)) < ROOMS.index(room(name))}


@pytest.mark.neutral
def test_only_what_is_named_after_a_framework_imports_it():
    found = {name: frameworks_of(source) - may_import(name) for name, source in SOURCES.items()}
    assert not {name: frameworks for name, frameworks in found.items() if frameworks}


@pytest.mark.neutral
def test_only_backends_asks_which_backend_runs():
    assert [name for name, source in SOURCES.items() if asks_for_the_backend(source)] == ["keras_shardopt.backends"]


@pytest.mark.neutral
def test_no_imports_go_in_a_circle():
    assert not circles({name: modules_imported(source) - {name} for name, source in SOURCES.items()})


@pytest.mark.neutral
def test_rooms_import_from_rooms_below():
    found = {name: upwards(name, source) for name, source in SOURCES.items()}
    assert not {name: modules for name, modules in found.items() if modules}


@pytest.mark.neutral
def test_only_one_file_looks_at_the_call_stack():
    words = ("_getframe", "currentframe", "inspect.stack")
    looks = [name for name, source in SOURCES.items() if any(word in source for word in words)]
    assert looks == ["keras_shardopt.backends.keras_callers"]


@pytest.mark.neutral
def test_no_module_is_named_after_nothing():
    nothing = {"utils", "util", "helpers", "common", "misc"}
    assert not [name for name in MODULES if nothing & set(name.split("."))]


@pytest.mark.neutral
def test_the_drawing_in_the_guide_is_that_of_the_imports(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE.parent / "docs")
    import draw_house

    page = draw_house.PAGE.read_text(encoding="utf-8")
    assert draw_house.drawing() in page, "run `python docs/draw_house.py`"
    assert "update --> wrapping" in draw_house.drawing()


@pytest.mark.neutral
def test_the_checks_can_fail():
    assert frameworks_of("def f():\n    import torch.nn") == {"torch"}
    assert not may_import("keras_shardopt.update.all_reduce")
    assert may_import("keras_shardopt.fit.torch") == may_import("keras_shardopt.backends.torch.ddp") == {"torch"}
    assert asks_for_the_backend("import keras\nkeras.config.backend()")
    assert asks_for_the_backend("from keras import backend")
    assert upwards("keras_shardopt.update.all_reduce", "from keras_shardopt.optimizers import CrossShard")
    assert upwards("keras_shardopt.backends.runtime", "from keras_shardopt import fit")
    assert not upwards("keras_shardopt.fit.scope", "from keras_shardopt.backends.active import runtime")
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.exhaustive  # test_import.py: no package at all
def test_importing_the_package_loads_no_other_framework(tmp_path):
    import os
    import subprocess
    import sys

    program = (
        "import sys, keras; before = set(sys.modules); import keras_shardopt; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        f"print(sorted(new & {FRAMEWORKS!r}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    ).stdout.strip()
    # On its own backend, parts of the framework that Keras has not touched yet; never another framework.
    assert eval(loaded) in ([], [os.environ["KERAS_BACKEND"]])
