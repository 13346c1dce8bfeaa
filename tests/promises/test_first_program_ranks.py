"""PyTorch: the first program of the README with what Keras users add; all in rank_first_program.py, on 2 ranks."""

import pathlib

import pytest
from support import checks
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(400)]

SOURCE = pathlib.Path(__file__).parent / "processes" / "rank_first_program.py"
CHECKS = checks.names_in(SOURCE)


# What test_same_script.py shows of two ranks by default, in more ways.
OTHERS = ["callbacks_that_watch_decide_as_in_one_process"]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return checks.Runs(request, SOURCE, tmp_path_factory.mktemp("safe"), 2)


@pytest.mark.parametrize("name", some(CHECKS, lambda name: name not in OTHERS))
def test_on_two_ranks(runs, name):
    runs.verify(name)
