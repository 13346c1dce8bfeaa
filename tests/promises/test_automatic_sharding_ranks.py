"""PyTorch: the same data on every rank trains as in one process; all in rank_sharding.py, on two or three ranks."""

import pathlib

import pytest
from support import checks
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(400)]

SOURCE = pathlib.Path(__file__).parent / "processes" / "rank_sharding.py"
CHECKS = checks.names_in(SOURCE)
# Of each kind of data one way, what is to be refused, and what is no data of all.
BY_DEFAULT = [
    *("arrays", "class_weights", "nested_inputs_and_outputs", "py_datasets", "data_loaders", "generators"),
    *("evaluate_and_predict", "several_steps_per_execution", "predictions_in_the_middle_of_training"),
    "outputs_of_other_kinds",
    *("parts_that_each_rank_loads", "data_that_differ_are_refused_on_every_rank"),
    *("batches_with_fewer_rows_than_ranks", "one_rank_alone_predicts_where_nothing_is_gathered"),
    *("losses_whose_values_are_chosen", "a_step_begins_before_others_have_their_rows"),
    "plain_calls_that_save",
    "a_sampler_of_each_rank_shuffles_by_the_number_of_the_epoch",
]
AGAIN = [
    *("arrays", "batches_with_fewer_rows_than_ranks", "class_weights", "py_datasets", "data_loaders", "generators"),
    *("evaluate_and_predict", "data_that_differ_are_refused_on_every_rank"),
]
RUNS = [(2, name) for name in BY_DEFAULT] + [(3, name) for name in CHECKS if name in AGAIN or name not in BY_DEFAULT]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return checks.Runs(request, SOURCE, tmp_path_factory.mktemp("sharding"))


@pytest.mark.parametrize(("num_ranks", "name"), some(RUNS, lambda run: run[0] == 2))
def test_on_ranks(runs, num_ranks, name):
    runs.verify(name, num_ranks)
