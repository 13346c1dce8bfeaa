"""PyTorch: everything in rank_overlap.py, on two and three ranks, in one spawn of workers each."""

import ast
import functools
import json
import pathlib

import pytest
from support import launch

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(600)]

SOURCE = pathlib.Path(__file__).with_name("rank_overlap.py")
# Read, not imported: the file is for workers.
CHECKS = [
    node.name
    for node in ast.parse(SOURCE.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
]
# All on two, where sums do not depend on their order; on three what may depend on the number.
ON_THREE = ["fit_sends_in_the_backward_pass", "gradients_that_some_ranks_lack", "gradients_that_come_in_parts"]
ON_THREE += ["parts_of_unequal_sizes", "ranks_that_end_early_are_noticed"]
RUNS = [(2, name) for name in CHECKS] + [(3, name) for name in ON_THREE]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Of a number of ranks: the names of the checks that passed, and what the workers printed where one failed."""
    folder = tmp_path_factory.mktemp("overlap")

    @functools.cache
    def run(num_ranks):
        file, names = folder / f"{num_ranks}.json", [name for n, name in RUNS if n == num_ranks]
        try:
            launch.torchrun(SOURCE.name, num_ranks, file, *names, timeout=240)
        except launch.WorkersFailed as failure:
            return [], str(failure)
        return json.loads(file.read_text()), ""

    return run


@pytest.mark.parametrize(("num_ranks", "name"), RUNS)
def test_on_ranks(outcome, num_ranks, name):
    passed, failure = outcome(num_ranks)
    if name not in passed:
        pytest.fail(failure, pytrace=False)
