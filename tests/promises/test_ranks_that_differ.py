"""PyTorch: ranks that train different things say so, each of them, before the first update."""

import json

import pytest
from support import launch

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(300)]

NUM_DIFFERENCES = 23
NUM_CALLS = 15


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    file = tmp_path_factory.mktemp("mismatches") / "passed.json"
    try:
        launch.torchrun("rank_mismatches.py", 3, file, timeout=200)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    return json.loads(file.read_text())


def test_every_difference_is_named_on_every_rank_before_the_first_update(passed):
    assert len(passed) == NUM_DIFFERENCES + 3 + NUM_CALLS


@pytest.mark.parametrize(
    "name",
    [
        *("prepare on one rank", "prepare on all but one", "evaluate on one rank", "SyncReplicas on one rank"),
        "save_model on one rank",
        *("prepare on one rank later", "one stops early", "one evaluates"),
        *("one leaves out an update", "an error on one rank, which lives on"),
        *("one leaves and evaluates", "one leaves the last promised step", "one stops after a batch of another model"),
        *("one leaves a loop of its own", "one leaves a loop without overlap"),
    ],
)
def test_different_calls_are_named_on_every_rank(passed, name):
    assert name in passed


@pytest.mark.parametrize("name", ["right programs", "compared once"])
def test_ranks_that_train_the_same_go_on(passed, name):
    assert name in passed
