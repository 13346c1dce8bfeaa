"""With synchronised batch normalisation replicas make the updates of one process with the whole batch."""

import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import normalizing
from support.suites import some

ON_JAX = ["gradients of each replica", "accumulated gradients of each replica"]
NAMES = {
    "tensorflow": [name for name in normalizing.CASES if name not in [*ON_JAX]],
    "jax": list(normalizing.CASES),
    "torch": [name for name in normalizing.CASES if name not in [*ON_JAX, "few rows"]],
}[BACKEND]
SAME = [name for name in NAMES if name not in ("mixed precision", "apart")]


@functools.cache
def alone(name):
    return normalizing.trained(None, name, converts=False)


@pytest.mark.parametrize("num_replicas", some([3, 2, 4], [3]))
@pytest.mark.parametrize("name", some(SAME, ["branches", "mask", "few rows", "skipped update", *ON_JAX[:1]]))
def test_update_is_that_of_one_process(world, name, num_replicas):
    got = world.run(normalizing.trained, num_replicas, name, of=NAMES)
    normalizing.assert_same(got, alone(name))
