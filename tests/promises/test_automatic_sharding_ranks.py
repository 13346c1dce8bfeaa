"""PyTorch: the same data on every rank trains as in one process; all in rank_sharding.py, on 3 ranks."""

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
ON_ANY_NUMBER = [
    *("arrays", "arrays_in_other_ways", "batches_with_fewer_rows_than_ranks", "class_weights"),
    *("a_second_fit_draws_other_orders", "py_datasets", "data_loaders", "generators", "evaluate_and_predict"),
]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return checks.Runs(request, SOURCE, tmp_path_factory.mktemp("sharding"), 3)


@pytest.mark.parametrize("name", some(CHECKS, BY_DEFAULT))
def test_on_three_ranks(runs, name):
    runs.verify(name)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.exhaustive
def test_on_other_numbers_of_ranks(tmp_path, num_ranks):
    assert checks.failures(SOURCE, num_ranks, tmp_path / "passed.json", ON_ANY_NUMBER) == {}
