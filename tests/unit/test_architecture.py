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
    "keras_shardopt.backends.tensorflow.communicator": {"tensorflow"},
    "keras_shardopt.backends.jax.communicator": {"jax"},
    "keras_shardopt.backends.torch.communicator": {"torch"},
    "keras_shardopt.fit.tensorflow": {"tensorflow"},
    "keras_shardopt.backends.tensorflow.losses": {"tensorflow"},
    "keras_shardopt.steps.tensorflow": {"tensorflow"},
    "keras_shardopt.backends.tensorflow.random_numbers": {"tensorflow"},
    "keras_shardopt.steps.jax": {"jax"},
    "keras_shardopt.fit.jax": {"jax"},
    "keras_shardopt.fit.torch": {"torch"},
    "keras_shardopt.backends.torch.fused": {"torch"},
    "keras_shardopt.backends.torch.overlap": {"torch"},
    "keras_shardopt.backends.torch.process_group": {"torch"},
    "keras_shardopt.backends.torch.random_numbers": {"torch"},
}
# From the top down. A module imports from its own layer or below.
LAYERS = [
    {"keras_shardopt"},
    {
        "keras_shardopt.checkpoint.backup",
        "keras_shardopt.data.dispatch",
        "keras_shardopt.steps.optimize_loss",
        "keras_shardopt.callbacks.replicas",
        "keras_shardopt.fit.scope",
    },
    {"keras_shardopt.summaries.recorder", "keras_shardopt.checkpoint.saving"},
    {"keras_shardopt.optimizers", "keras_shardopt.schedules"},
    {
        "keras_shardopt.wrapping.wrapper",
        "keras_shardopt.update.nonfinite",
        "keras_shardopt.update.agreement",
        "keras_shardopt.sharding.separability",
        "keras_shardopt.sharding.slices",
        "keras_shardopt.sharding.even_slices",
        "keras_shardopt.sharding.sharded_optimizer",
        "keras_shardopt.optimizers.two_phases",
    },
    {"keras_shardopt.wrapping.rollback"},
    {"keras_shardopt.update.all_reduce", "keras_shardopt.update.accumulation"},
    {"keras_shardopt.backends"},
    {
        "keras_shardopt.backends.communicator",
        "keras_shardopt.sharding.partition",
        "keras_shardopt.numerics",
        "keras_shardopt.wrapping.slots",
        "keras_shardopt.models",
        "keras_shardopt.fit.losses",
    },
    {"keras_shardopt._typing", "keras_shardopt.arguments", "keras_shardopt.checkpoint.atomic_file"},
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
    assert asks_for_the_backend(MODULES[name].read_text()) == (name == "keras_shardopt.backends")


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
    assert wrong_way("keras_shardopt.update.all_reduce", "from keras_shardopt.optimizers import CrossShard")
    assert wrong_way("keras_shardopt.backends.communicator", "from keras_shardopt import replica")
    assert not wrong_way("keras_shardopt.fit.scope", "from keras_shardopt.backends import framework")


@pytest.mark.exhaustive("jax", "tensorflow")
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
