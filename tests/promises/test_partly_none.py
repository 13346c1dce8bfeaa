"""None in the structure of data trains on replicas as in one process: weights of one output, an optional input."""

import functools

import pytest
from conftest import BACKEND
from promises.problems import partly_none, uneven
from support.suites import some

BY_DEFAULT = {
    "tensorflow": ["batches"],
    "jax": ["arrays", "each replica's gradients"],
    "torch": list(partly_none.CASES),
}[BACKEND]


@functools.cache
def alone(case):
    return partly_none.run(None, case)


@pytest.mark.parametrize("case", some(partly_none.CASES, BY_DEFAULT))
def test_updates_and_logs_are_those_of_one_process(world, case):
    got = world.run(partly_none.run, 2, case, of=partly_none.CASES)
    uneven.assert_same(got, alone(case), partly_none.two_outputs().get_weights())
