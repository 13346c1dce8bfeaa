"""Any style of training gives identical replicas, and the weights and slots of one process with the whole batch."""

import keras
import pytest
from conftest import BACKEND
from promises.problems import styles
from support import launch, problem

import keras_shardopt as ks
from keras_shardopt.backends.active import placement
from keras_shardopt.fit.scope import largest_difference
from keras_shardopt.update import reducers

pytestmark = pytest.mark.timeout(400)

NUM_REPLICAS = {"tensorflow": 2, "jax": 4, "torch": 2}
CELLS = [
    pytest.param(style, id=f"{backend}-{style}", marks=pytest.mark.backends(backend))
    for backend in NUM_REPLICAS
    for style in styles.STYLES
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the ranks of PyTorch came to, all styles in one spawn of workers."""
    import numpy as np

    if BACKEND != "torch":
        return None
    file = tmp_path_factory.mktemp("styles") / "results.npz"
    launch.torchrun("rank_styles.py", NUM_REPLICAS["torch"], file, timeout=200)
    return dict(np.load(file))


@pytest.fixture(scope="module")
def one_process():
    return styles.outcome(styles.trained("built-in step", problem.sgd_momentum(), *problem.data(), problem.BATCH_SIZE))


def on_devices(style):
    """The largest difference between replicas, and what they came to."""
    with ks.data_parallel(NUM_REPLICAS[BACKEND]) as replicas:
        model = styles.trained(style, ks.CrossShard(problem.sgd_momentum()), *problem.data(), problem.BATCH_SIZE)
        variables = [*model.trainable_variables, *model.optimizer.variables]
        assert placement.fingerprints(variables).shape == (NUM_REPLICAS[BACKEND], len(variables))
        difference = largest_difference(variables)
        found = styles.outcome(model)
    replicas.close()
    return difference, found


@pytest.mark.parametrize("style", CELLS)
def test_replicas_are_identical_and_equal_one_process(style, one_process, ranks):
    if BACKEND == "jax" and "train_on_batch" in style and keras.__version__.startswith("3.12."):
        pytest.skip("Keras 3.12 cannot `train_on_batch` under a distribution without sample weights")
    if BACKEND == "torch":
        difference, found = ranks[f"{style}/difference"], [ranks[f"{style}/{i}"] for i in range(len(one_process))]
    else:
        difference, found = on_devices(style)
    assert difference == 0
    styles.check_equal(found, one_process)


@pytest.mark.backends("tensorflow", "jax")
def test_replicas_that_do_not_reduce_are_found(monkeypatch):
    """The zero above can be something else."""
    monkeypatch.setattr(reducers, "global_gradients", lambda grads, *_: grads)
    difference, _ = on_devices("hand-written loop")
    assert difference > 1e-3
