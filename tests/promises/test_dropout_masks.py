"""Replicas draw dropout masks of their own: row i of each is masked in another way. (PyTorch: rank_checks.py.)"""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow", "jax")

NUM_ROWS, SIZE = 8, 64


def masks(num_replicas, layer, prepared, **arguments):
    """Which elements each row keeps in a step: those whose weights move."""
    keras.utils.set_random_seed(5)
    with ks.data_parallel(num_replicas, prepare=False) as replicas:
        layers = [keras.Input((1,), dtype="int32"), keras.layers.Embedding(NUM_ROWS, SIZE), layer()]
        model = keras.Sequential([*layers, keras.layers.Flatten()])
        model.compile(ks.CrossShard(keras.optimizers.SGD(1.0), **arguments), loss="mae")
    if prepared:
        ks.prepare(model)
    before = model.get_weights()[0]
    x = np.arange(NUM_ROWS)[:, None]
    model.fit(x, np.full((NUM_ROWS, SIZE), 9.0), batch_size=NUM_ROWS, shuffle=False, verbose=0)
    moved = model.get_weights()[0] != before
    replicas.close()
    return moved


WAYS = {
    "plain": (False, {}),
    "prepared": (True, {}),
    "gradients of each replica": (True, {"replica_clipnorm": 1e9}),  # on JAX: a program for each replica
    "accumulating": (True, {"gradient_accumulation_steps": 1, "replica_clipnorm": 1e9}),
}
CHOSEN = [("prepared" if BACKEND == "tensorflow" else "gradients of each replica", 3)]


@pytest.mark.parametrize(("way", "seed"), some([(way, seed) for way in WAYS for seed in (None, 3)], CHOSEN))
def test_replicas_draw_other_masks(way, seed):
    prepared, arguments = WAYS[way]

    def layer():
        return keras.layers.Dropout(0.5, seed=seed)

    moved = masks(2, layer, prepared, **arguments)
    halves = moved[: NUM_ROWS // 2], moved[NUM_ROWS // 2 :]
    assert all(0.2 < half.mean() < 0.8 for half in halves)
    # Of two masks that know nothing of each other half the elements agree.
    assert (halves[0] == halves[1]).mean() < 0.75
    np.testing.assert_array_equal(masks(2, layer, prepared, **arguments), moved)
