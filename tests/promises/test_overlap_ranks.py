"""PyTorch: everything in rank_overlap.py, on two and three ranks, in one spawn of workers each."""

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
def runs(request, tmp_path_factory):
    return checks.Runs(request, SOURCE, tmp_path_factory.mktemp("overlap"))


@pytest.mark.parametrize(("num_ranks", "name"), some(RUNS, lambda case: case not in LONG))
def test_on_ranks(runs, num_ranks, name):
    runs.verify(name, num_ranks)
