"""The examples in the docstrings run, and every public name has a docstring."""

import doctest
import importlib
import pathlib

import pytest

import keras_shardopt as ks

PACKAGE = pathlib.Path(ks.__file__).parent
MODULES = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
    if not file.name.startswith(("tf_", "jax_", "torch_"))  # these import a framework, which need not be there
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert not failed


@pytest.mark.parametrize("name", ks.__all__)
def test_public_names_have_a_docstring_with_an_example(name):
    thing = getattr(ks, name)
    assert thing.__doc__
    assert ">>>" in thing.__doc__ or not callable(thing)
