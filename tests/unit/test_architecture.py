"""The layout holds: who may import a framework, who may ask for the backend, and imports go round in no circle."""

import ast
import collections
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
    "doctor",
    "extensions",
    "launch",
    "compile_for",
    "callbacks",
    "classic",
    "fit",
    "checkpoint",
    "optimizers",
    "schedules",
    "sharding",
    "update",
    "wrapping",
    "kernels",
    "data",
    "backends",
    "numerics",
    "arguments",
]

SOURCES = {name: file.read_text() for name, file in MODULES.items()}


@functools.cache
def _nodes(source):
    found = collections.defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        found[type(node)].append(node)
    return found


def nodes(source, *kinds):
    """All nodes of these kinds in a source text, which is read once."""
    return [node for kind in kinds for node in _nodes(source).get(kind, ())]


def imports(source):
    """Every module that a source text imports, at any depth, with the names taken from it."""
    for node in nodes(source, ast.Import):
        for alias in node.names:
            yield alias.name, None
    for node in nodes(source, ast.ImportFrom):
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
        isinstance(node.func, ast.Attribute) and node.func.attr == "backend" for node in nodes(source, ast.Call)
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
def test_warnings_point_at_the_user_and_come_once_in_a_job():
    """By `backends/user_warnings.py`; on TensorFlow's own side of that, by the function that it calls."""
    warns = [name for name, source in SOURCES.items() if "warnings.warn" in source]
    assert warns == ["keras_shardopt.backends.keras_callers"]
    by_itself = {name for name, source in SOURCES.items() if "warn_user" in source}
    assert by_itself - set(warns) == {
        "keras_shardopt.backends.user_warnings",
        "keras_shardopt.backends.tensorflow.placement",
    }


@pytest.mark.backends("torch")
def test_all_that_ask_for_objects_are_named_in_errors():
    from keras_shardopt.backends.torch.processes import _CALLS

    asking = {
        function.name
        for name, source in SOURCES.items()
        if "processes.gather_objects" in source and not may_import(name)
        for function in nodes(source, ast.FunctionDef)
        if any(
            isinstance(n, ast.Call) and ast.unparse(n.func) == "processes.gather_objects" for n in ast.walk(function)
        )
    }
    assert asking == set(_CALLS)


@pytest.mark.neutral
def test_no_module_is_named_after_nothing():
    nothing = {"utils", "util", "helpers", "common", "misc"}
    assert not [name for name in MODULES if nothing & set(name.split("."))]


@pytest.mark.neutral
def test_the_drawing_in_the_guide_is_that_of_the_imports(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE.parent / "docs")
    import draw_house

    drawing = draw_house.drawing()
    assert drawing in draw_house.PAGE.read_text(encoding="utf-8"), "run `python docs/draw_house.py`"
    assert "update --> wrapping" in drawing


# -- the house in numbers --------------------------------------------------------------------------------------------

SEAM = ["Communicator", "Runtime", "Placement", "Processes"]


def classes(source):
    return nodes(source, ast.ClassDef)


def own_names(node):
    """The names that a class defines: methods, and attributes of the class or set in its constructor."""
    found = set()
    for each in node.body:
        found |= {each.name} if isinstance(each, ast.FunctionDef) else set()
        found |= {each.target.id} if isinstance(each, ast.AnnAssign) else set()
        found |= {target.id for target in each.targets} if isinstance(each, ast.Assign) else set()
    made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    stores = [each for function in made for each in ast.walk(function) if isinstance(each, ast.Attribute)]
    return found | {each.attr for each in stores if isinstance(each.ctx, ast.Store)}


def seam():
    """The members of the four interfaces, as `(interface, member)`."""
    found = []
    for interface in SEAM:
        (node,) = [c for c in classes(SOURCES[f"keras_shardopt.backends.{interface.lower()}"]) if c.name == interface]
        found += [(interface, name) for name in sorted(own_names(node)) if not name.startswith("_")]
    return found


@functools.cache
def attributes(source):
    """How often a source text looks up an attribute of a variable, as `{(attribute, variable or None): number}`."""
    return collections.Counter((n.attr, getattr(n.value, "id", None)) for n in nodes(source, ast.Attribute))


def call_sites():
    """How often other rooms than the backends use each member of the four interfaces."""
    used = collections.Counter()
    for name, source in SOURCES.items():
        if room(name) != "backends":
            used.update(attributes(source))
    others = [name.lower() for name in SEAM[1:]]
    found = collections.Counter()
    for (attribute, owner), number in used.items():
        interface = owner.capitalize() if owner in others else "Communicator"
        found[interface, attribute] += number
    return found


def overriding_backends():
    """The backends that define each member of the four interfaces themselves."""
    backends = collections.defaultdict(set)
    for name, source in SOURCES.items():
        for node in classes(source) if may_import(name) else ():
            for base in node.bases:
                for member in own_names(node) if getattr(base, "id", None) in SEAM else ():
                    backends[base.id, member].add(name.split(".")[2])
    return backends


def floors(graph):
    """How many rooms stand on top of each other."""

    @functools.cache
    def height(room):
        return 1 + max(map(height, graph[room]), default=0)

    return max(map(height, graph))


def house():
    """The numbers that say how well the house can be read, by name."""
    # `python -m keras_shardopt` is a room of its own here.
    room_of = {name: "__main__" if name.endswith("__main__") else room(name) for name in SOURCES}
    graph = {room: set() for room in room_of.values()}
    for name, source in SOURCES.items():
        graph[room_of[name]] |= {room_of[module] for module in modules_imported(source)} - {room_of[name]}
    optimizer = SOURCES["keras_shardopt.optimizers.cross_shard"]
    (cross_shard,) = [node for node in classes(optimizer) if node.name == "CrossShard"]
    functions = [node for source in SOURCES.values() for node in nodes(source, ast.FunctionDef)]
    members, used, overriding = seam(), call_sites(), overriding_backends()
    return {
        "rooms": len(graph),
        "floors": floors(graph),
        "arrows": sum(map(len, graph.values())),
        "rooms on circles": len(circles(graph)),
        "lines of the largest file": max(source.count("\n") for source in SOURCES.values()),
        "lines of cross_shard.py": optimizer.count("\n"),
        "methods of CrossShard": sum(isinstance(node, ast.FunctionDef) for node in cross_shard.body),
        "ifs of cross_shard.py": len(nodes(optimizer, ast.If)),
        "members of the seam": len(members),
        "members of the largest interface": max(sum(name == each for name, _ in members) for each in SEAM),
        "members with one call site": sum(used[member] == 1 for member in members),
        "members with one override": sum(len(overriding[member]) == 1 for member in members),
        "`groups` parameters": sum(a.arg == "groups" for f in functions for a in [*f.args.args, *f.args.kwonlyargs]),
        "lines with `__dict__`": sum("__dict__" in line for s in SOURCES.values() for line in s.splitlines()),
        "lines of a stage in one file": SOURCES["keras_shardopt.extensions.noise.stage"].count("\n"),
    }


LIMITS = {
    "rooms": 20,
    "floors": 11,
    "arrows": 80,
    "rooms on circles": 0,
    "lines of the largest file": 560,
    "lines of cross_shard.py": 300,
    "methods of CrossShard": 18,
    "ifs of cross_shard.py": 20,
    "members of the seam": 50,
    "members of the largest interface": 13,
    "members with one call site": 12,
    "members with one override": 12,
    "`groups` parameters": 6,
    "lines with `__dict__`": 12,
    "lines of a stage in one file": 80,
}


@pytest.mark.neutral
def test_the_house_stays_as_small_as_it_was_built():
    found = house()
    assert found.keys() == LIMITS.keys()
    assert not {name: (number, LIMITS[name]) for name, number in found.items() if number > LIMITS[name]}


@pytest.mark.neutral
def test_trainers_use_no_private_members_of_the_optimizer():
    (cross_shard,) = [c for c in classes(SOURCES["keras_shardopt.optimizers.cross_shard"]) if c.name == "CrossShard"]
    private = {name for name in own_names(cross_shard) if name.startswith("_") and not name.startswith("__")}
    trainers = [source for name, source in SOURCES.items() if room(name) == "fit" and may_import(name)]
    used = {attribute for source in trainers for attribute, _ in attributes(source)}
    assert "_update" in private and not private & used


@pytest.mark.neutral
def test_the_numbers_of_the_house_can_be_too_large(monkeypatch):
    before = house()
    planted = {
        "keras_shardopt.callbacks.more": "from keras_shardopt.launch import runtime\n" + "\n" * 600,
        "keras_shardopt.backends.jax.more": "class A(Runtime):\n  def cond(self, groups):\n    return self.__dict__",
        "keras_shardopt.classic.more": "runtime.value_and_grad()",
        "keras_shardopt.more.room": "",
    }
    for name, source in planted.items():
        monkeypatch.setitem(MODULES, name, PACKAGE / "more.py")
        monkeypatch.setitem(SOURCES, name, source)
    monkeypatch.setitem(SOURCES, "keras_shardopt.backends.torch.runtime", "")  # `no_compile` is that of nobody now
    after = house()
    larger = {name for name, number in after.items() if number > before[name]}
    assert larger >= {"rooms", "arrows", "lines of the largest file", "`groups` parameters", "lines with `__dict__`"}
    counted = ("members with one call site", "members with one override")
    assert [after[name] for name in counted] != [before[name] for name in counted]


@pytest.mark.neutral
def test_the_checks_can_fail():
    assert frameworks_of("def f():\n    import torch.nn") == {"torch"}
    assert not may_import("keras_shardopt.update.reducers")
    assert may_import("keras_shardopt.fit.torch") == may_import("keras_shardopt.backends.torch.ddp") == {"torch"}
    assert asks_for_the_backend("import keras\nkeras.config.backend()")
    assert asks_for_the_backend("from keras import backend")
    assert upwards("keras_shardopt.update.reducers", "from keras_shardopt.optimizers import CrossShard")
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
