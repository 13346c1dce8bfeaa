"""PyTorch: everything in rank_sharded_weights.py, on two and three ranks, in one spawn of workers each."""

import keras
import pytest
from support import checks, launch
from support.suites import some

import keras_shardopt as ks

SOURCE = launch.SCRIPTS / "rank_sharded_weights.py"
LONG = ["layers_use_weights_as_they_like", "options_of_updates_keep_their_meaning", "files_have_whole_weights"]
LONG += [
    "a_loop_of_the_program_may_change_weights_in_place",
    "functions_of_the_program_get_and_save_weights",
    "models_may_share_divided_weights_and_a_step_has_one_such_optimizer",
    "weights_can_be_set_between_calls_of_fit",
    "steps_of_other_kinds",
    "fit_continues_after_an_error",
    "all_ranks_may_read_and_assign_in_callbacks",
]
# What depends on how weights are divided.
ON_THREE = ["weights_are_those_of_sharded_state", "layers_use_weights_as_they_like", "files_have_whole_weights"]
ON_THREE += ["a_rank_holds_its_slices_between_steps_and_some_buckets_in_them"]
ON_THREE += ["ranks_that_gather_in_different_orders_raise"]
RUNS = [(2, name) for name in checks.names_in(SOURCE)] + [(3, name) for name in ON_THREE]


def is_default(run):
    return run[0] == 2 and run[1] not in LONG


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return checks.Runs(request, SOURCE, tmp_path_factory.mktemp("sharded_weights"))


@pytest.mark.backends("torch")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "name"), some(RUNS, is_default))
def test_on_ranks(runs, num_ranks, name):
    runs.verify(name, num_ranks)


def test_options_that_contradict_it_are_errors():
    if keras.config.backend() != "torch":
        with pytest.raises(ValueError, match="PyTorch backend only"):
            ks.CrossShard("sgd", shard_state=True, extensions=[ks.ShardedWeights()])
        return
    with pytest.raises(ValueError, match="shard_state=False"):
        ks.CrossShard("sgd", extensions=[ks.ShardedWeights()])
    with pytest.raises(ValueError, match="another extension"):
        ks.CrossShard("sgd", shard_state=True, extensions=[ks.ShardedWeights(), ks.VirtualReplicas(2)])


@pytest.mark.backends("torch")
def test_one_process_keeps_whole_weights():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = ks.CrossShard("sgd", shard_state=True, extensions=[ks.ShardedWeights(prefetch=0)])
    model.compile(optimizer, "mse")
    model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 2)), verbose=0)
    again = ks.CrossShard.from_config(optimizer.get_config())
    assert repr(again) == repr(optimizer) and again.extensions[0].prefetch == 0
