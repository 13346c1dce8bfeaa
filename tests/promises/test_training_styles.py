"""Any style of training gives identical replicas, and the weights and slots of one process with the whole batch."""

import keras
import pytest
from conftest import BACKEND
from promises.problems import styles
from support import problem
from support.reducing import plant

pytestmark = pytest.mark.timeout(400)

NUM_REPLICAS = {"tensorflow": 2, "jax": 4, "torch": 2}
CELLS = [
    pytest.param(style, id=f"{backend}-{style}", marks=pytest.mark.backends(backend))
    for backend in NUM_REPLICAS
    for style in styles.STYLES
]


@pytest.fixture(scope="module")
def one_process():
    return styles.outcome(styles.trained("built-in step", problem.sgd_momentum(), *problem.data(), problem.BATCH_SIZE))


@pytest.mark.parametrize("style", CELLS)
def test_replicas_are_identical_and_equal_one_process(world, style, one_process):
    if BACKEND == "jax" and "train_on_batch" in style and keras.__version__.startswith("3.12."):
        pytest.skip("Keras 3.12 cannot `train_on_batch` under a distribution without sample weights")
    difference, found = world.run(styles.on_replicas, NUM_REPLICAS[BACKEND], style, of=styles.STYLES)
    assert difference == 0
    styles.check_equal(found, one_process)


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.exhaustive
def test_replicas_that_do_not_reduce_are_found(world, monkeypatch):
    """The zero above can be something else."""
    plant(monkeypatch, lambda grads, *_: grads)
    difference, _ = world.run(styles.on_replicas, NUM_REPLICAS[BACKEND], "custom training loop")
    assert difference > 1e-3
