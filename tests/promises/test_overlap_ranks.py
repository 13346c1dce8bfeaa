"""PyTorch: everything in rank_overlap.py, on two and three ranks, in one spawn of workers each."""

import functools

import pytest
from support import checks, launch
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(600)]

SOURCE = launch.SCRIPTS / "rank_overlap.py"
CHECKS = checks.names_in(SOURCE)
# All on two, where sums do not depend on their order; on three what may depend on the number.
ON_THREE = ["fit_sends_in_the_backward_pass", "gradients_that_some_ranks_lack", "gradients_that_come_in_parts"]
ON_THREE += ["parts_of_unequal_sizes", "ranks_that_end_early_are_noticed", "slices_travel_in_the_backward_pass"]
ON_THREE += ["gradients_are_let_go_when_they_are_sent"]
RUNS = [(2, name) for name in CHECKS] + [(3, name) for name in ON_THREE]
LONG = [(2, "compiled_steps"), (2, "slices_of_gradients_meet_what_others_meet")]
LONG += [(2, "coded_gradients_meet_what_others_meet"), (2, "a_step_calls_few_functions_of_python")]
LONG += [(2, "coded_gradients_travel_in_the_backward_pass"), (2, "what_is_raised_while_coding_reaches_the_user")]
LONG += [(2, "what_is_not_finite_leaves_nothing_in_what_is_unsent")]
LONG += [(3, name) for name in ON_THREE]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Of a number of ranks: the names of the checks that passed, and what the workers printed in the others."""
    folder = tmp_path_factory.mktemp("overlap")

    @functools.cache
    def run(num_ranks, is_long):
        names = [name for n, name in RUNS if n == num_ranks and ((n, name) in LONG) == is_long]
        file = folder / f"{num_ranks}-{is_long}.json"
        return checks.passed_and_failures(SOURCE, num_ranks, file, names, timeout_alone=60)

    return run


@pytest.mark.parametrize(("num_ranks", "name"), some(RUNS, lambda case: case not in LONG))
def test_on_ranks(outcome, num_ranks, name):
    passed, failures = outcome(num_ranks, (num_ranks, name) in LONG)
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
    assert name in passed
