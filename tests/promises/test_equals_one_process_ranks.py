"""PyTorch: ranks started by torchrun equal one process with the whole batch."""

import functools

import keras
import numpy as np
import pytest
from support import launch, problem
from support.suites import some

from keras_shardopt.backends.side_channel import NUM_MARKS

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(400)]

FOR_ALL = ["SGD momentum", "sum", "clipped", "scaled", "eager loop", "replica clip", "replica clip, scaled"]
FOR_ALL += ["fault: dropped", "fault: summed twice"]
OPTIMIZERS = [name for name in problem.keras_optimizers() if name != "SGD momentum"]
BY_DEFAULT = [("Adam", 2), ("Lamb", 2)]  # one element by element, one that sees whole gradients
NUM_PARAMETERS = sum(w.size for w in problem.start_weights())
each_number = pytest.mark.parametrize("num_replicas", some([2, 4], [2]))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs of rank_fit.py, one spawn of workers for all cases of one number of ranks."""

    names = {2: [name for name, _ in BY_DEFAULT], 4: OPTIMIZERS}

    @functools.cache
    def run(num_replicas):
        file = tmp_path_factory.mktemp("ranks") / "results.npz"
        try:
            launch.torchrun("rank_fit.py", num_replicas, file, "same", *FOR_ALL, *names[num_replicas])
        except launch.WorkersFailed as failure:
            return failure  # remembered: one spawn that fails is enough
        return np.load(file)

    def results(num_replicas):
        outcome = run(num_replicas)
        if isinstance(outcome, launch.WorkersFailed):
            pytest.fail(str(outcome), pytrace=False)
        return outcome

    return results


@functools.cache
def one_process(name, factor=1.0):
    """The weights after one process has trained on the whole batches."""
    special = {
        "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        "sum": lambda: keras.optimizers.SGD(0.1 * factor, momentum=0.9),
    }
    make = special.get(name) or problem.keras_optimizers().get(name, problem.sgd_momentum)
    model = problem.model()
    model.compile(make(), "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


def difference(results, name, factor=1.0):
    weights = [results[f"{name}/weight{i}"] for i in range(4)]
    return problem.relative_difference(weights, one_process(name, factor))


@each_number
@pytest.mark.parametrize("name", ["SGD momentum", "clipped", "scaled", "eager loop"])
def test_ranks_equal_one_process(ranks, num_replicas, name):
    results = ranks(num_replicas)
    assert difference(results, name) <= problem.TOLERANCE
    assert results[f"{name}/difference"] == 0


@each_number
@pytest.mark.parametrize("name", ["replica clip", "replica clip, scaled"])
def test_each_replica_is_clipped_by_itself(ranks, num_replicas, name):
    results = ranks(num_replicas)
    weights = [results[f"{name}/weight{i}"] for i in range(4)]
    reference = problem.replicas_in_numpy(num_replicas, problem.CLIPNORM)[0]
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE
    assert results[f"{name}/difference"] == 0


@each_number
def test_the_sum_is_that_many_times_the_mean(ranks, num_replicas):
    # A rate times N, the momentum scaled along with it.
    assert difference(ranks(num_replicas), "sum", float(num_replicas)) <= problem.TOLERANCE


@pytest.mark.parametrize(("name", "num_replicas"), some([*BY_DEFAULT, *((name, 4) for name in OPTIMIZERS)], BY_DEFAULT))
def test_every_keras_optimizer(ranks, name, num_replicas):
    assert difference(ranks(num_replicas), name) <= problem.tolerance(name)
    assert ranks(num_replicas)[f"{name}/difference"] == 0


@each_number
def test_one_flat_all_reduce_per_update(ranks, num_replicas):
    # All gradients, and one number per variable that says whether it had one.
    calls = ranks(num_replicas)["SGD momentum/calls"]
    # With which of 4 gradients there are, which variables are trained, whether the rank goes on or ends,
    # whether a gradient came late, whether the number of updates is odd or even; and once more when `fit` ends.
    np.testing.assert_array_equal(calls, [NUM_PARAMETERS + 9 + NUM_MARKS] * (problem.NUM_STEPS + 1))


@each_number
@pytest.mark.parametrize("fault", ["fault: dropped", "fault: summed twice"])
def test_a_planted_fault_is_seen(ranks, num_replicas, fault):
    assert difference(ranks(num_replicas), fault) > 1000 * problem.TOLERANCE


def test_a_dropped_reduction_leaves_replicas_different(ranks):
    assert ranks(2)["fault: dropped/difference"] > 1e-3


def test_ranks_that_start_apart_take_rank_0s_weights_and_agree(tmp_path):
    file = tmp_path / "results.npz"
    launch.torchrun("rank_fit.py", 2, file, "different", "SGD momentum", "Adam")
    results = np.load(file)
    for name in ("SGD momentum", "Adam"):
        assert results[f"{name}/difference"] == 0
