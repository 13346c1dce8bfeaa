"""The layout holds: who may import a framework, who may ask for the backend, which way imports point."""

import ast
import pathlib

import pytest

import keras_shardopt

PACKAGE = pathlib.Path(keras_shardopt.__file__).parent
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}
FRAMEWORKS = {"tensorflow", "jax", "jaxlib", "torch", "flax", "optax"}
MAY_IMPORT_A_FRAMEWORK = {
    "keras_shardopt.replica.tf_distribute": {"tensorflow"},
    "keras_shardopt.replica.jax_sharding": {"jax"},
    "keras_shardopt.replica.torch_distributed": {"torch"},
    "keras_shardopt.replica.tf_fit": {"tensorflow"},
    "keras_shardopt.replica.tf_losses": {"tensorflow"},
    "keras_shardopt.replica.tf_step": {"tensorflow"},
    "keras_shardopt.replica.tf_random": {"tensorflow"},
    "keras_shardopt.replica.jax_step": {"jax"},
    "keras_shardopt.replica.jax_fit": {"jax"},
    "keras_shardopt.replica.torch_fit": {"torch"},
    "keras_shardopt.replica.torch_fused": {"torch"},
    "keras_shardopt.replica.torch_overlap": {"torch"},
    "keras_shardopt.replica.torch_group": {"torch"},
    "keras_shardopt.replica.torch_random": {"torch"},
}
# From the top down. A module imports from its own layer or below.
LAYERS = [
    {"keras_shardopt"},
    {
        "keras_shardopt.backup",
        "keras_shardopt.data",
        "keras_shardopt.training",
        "keras_shardopt.callbacks",
        "keras_shardopt.parallel",
    },
    {"keras_shardopt.summaries", "keras_shardopt.saving"},
    {"keras_shardopt.optimizers", "keras_shardopt.schedules"},
    {
        "keras_shardopt.wrapper",
        "keras_shardopt.finite",
        "keras_shardopt.agreement",
        "keras_shardopt.cutting",
        "keras_shardopt.sharding",
        "keras_shardopt.even_shards",
        "keras_shardopt.divided_state",
        "keras_shardopt.two_phases",
    },
    {"keras_shardopt.rollback"},
    {"keras_shardopt.reduction", "keras_shardopt.accumulation"},
    {"keras_shardopt.replica"},
    {
        "keras_shardopt.replica.base",
        "keras_shardopt.partition",
        "keras_shardopt.numerics",
        "keras_shardopt.slots",
        "keras_shardopt.models",
        "keras_shardopt.whole_batch",
    },
    {"keras_shardopt._typing", "keras_shardopt.arguments", "keras_shardopt.atomic"},
]

each_module = pytest.mark.parametrize("name", MODULES)


def imports(source):
    """Every module that a source text imports, at any depth, with the names taken from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield node.module, alias.name


def frameworks_of(source):
    return {module.split(".")[0] for module, _ in imports(source)} & FRAMEWORKS


def asks_for_the_backend(source):
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backend"
        for node in ast.walk(ast.parse(source))
    ) or any(name == "backend" and module.startswith("keras") for module, name in imports(source))


def layer(module):
    while module:
        for height, names in enumerate(LAYERS):
            if module in names:
                return height
        module = module.rpartition(".")[0]
    raise AssertionError("unreachable")


def wrong_way(name, source):
    """The modules of the package that `name` imports although they are above it."""
    targets = set()
    for module, taken in imports(source):
        full = f"{module}.{taken}"
        targets.add(full if full in MODULES else module)
    return {target for target in targets if target.startswith("keras_shardopt") and layer(target) < layer(name)}


@each_module
@pytest.mark.neutral
def test_only_the_three_backend_files_import_a_framework(name):
    assert frameworks_of(MODULES[name].read_text()) <= MAY_IMPORT_A_FRAMEWORK.get(name, set())


@each_module
@pytest.mark.neutral
def test_only_replica_asks_which_backend_runs(name):
    assert asks_for_the_backend(MODULES[name].read_text()) == (name == "keras_shardopt.replica")


@each_module
@pytest.mark.neutral
def test_imports_point_one_way(name):
    assert not wrong_way(name, MODULES[name].read_text())


@each_module
@pytest.mark.neutral
def test_no_module_is_named_after_nothing(name):
    assert not {"utils", "util", "helpers", "common", "misc"} & set(name.split("."))


@pytest.mark.neutral
def test_the_checks_can_fail():
    assert frameworks_of("def f():\n    import torch.nn") == {"torch"}
    assert asks_for_the_backend("import keras\nkeras.config.backend()")
    assert asks_for_the_backend("from keras import backend")
    assert wrong_way("keras_shardopt.reduction", "from keras_shardopt.optimizers import CrossShard")
    assert wrong_way("keras_shardopt.replica.base", "from keras_shardopt import replica")
    assert not wrong_way("keras_shardopt.parallel", "from keras_shardopt.replica import framework")


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
