"""The examples in the docstrings run, and every public name has a docstring."""

import doctest
import importlib
import inspect
import pathlib

import keras
import pytest

import keras_shardopt as ks
from keras_shardopt.update.old_arguments import KINDS

PACKAGE = pathlib.Path(ks.__file__).parent
OTHERS = {"tensorflow", "jax", "torch"} - {keras.config.backend()}  # which need not be there
MODULES = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
    if not OTHERS.intersection(file.relative_to(PACKAGE).with_suffix("").parts)
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.exhaustive("jax", "tensorflow")
def test_examples_run(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert not failed


@pytest.mark.parametrize("name", ks.__all__)
@pytest.mark.neutral
def test_public_names_have_a_docstring_with_an_example(name):
    thing = getattr(ks, name)
    assert thing.__doc__
    assert ">>>" in thing.__doc__ or not callable(thing)


@pytest.mark.neutral
def test_help_of_cross_shard_fits_two_screens():
    assert len(inspect.getdoc(ks.CrossShard).splitlines()) <= 60


# What wrappers have for users besides what every optimizer of Keras has.
FOR_USERS = {
    *("inner", "loss_scale", "skipped_steps", "get_slot", "get_slot_names", "get_name"),
    *(
        "compute_gradients",
        "minimize",
        "memory_report",
        "communication_report",
        "last_nonfinite",
        "check_finite",
        "has_been_used",
        "ratio",
    ),
}
# What concrete wrappers fill in, and what Keras' saver and `MultiOptimizer` look for under these names.
FOR_WRAPPERS = {"transform_gradients", "update_inner", "wrapper_state", "optimizers"}


@pytest.mark.parametrize(
    "name", ["CrossShard", "GradientClipping", "LARC", "LossScaling", "MixedPrecision", "Tower", "VariableClipping"]
)
@pytest.mark.neutral
def test_what_the_package_asks_of_wrappers_is_not_in_their_help(name):
    keras_has = set(dir(keras.optimizers.Optimizer)) | set(vars(keras.optimizers.SGD()))
    shown = {each for each in dir(getattr(ks, name)) if not each.startswith("_")}
    arguments = set(inspect.signature(getattr(ks, name)).parameters) | {a for kind in KINDS for a in kind.old_arguments}
    assert shown - keras_has - arguments <= FOR_USERS | FOR_WRAPPERS
