"""What an update costs is counted from shapes alone, and whole variables are divided by it."""

import functools
import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_shardopt.sharding import costs, separability
from keras_shardopt.sharding.division import buckets_of

pytestmark = pytest.mark.backends("torch")  # the only one that gives whole variables to ranks


def variables(shapes):
    """Without memory, so that they may be large."""
    with keras.device("meta"):
        made = []
        for path, shape in shapes:
            *scopes, name = path.split("/")
            with keras.name_scope("/".join(scopes)):
                made.append(keras.Variable(shape=shape, initializer="zeros", name=name))
        return made


def transformer(depths, vocabulary, num_heads_of_keys=1.0):
    """The shapes of a transformer's weights. `depths` is the number of blocks of each width."""
    shapes = [("embedding/embeddings", (vocabulary, next(iter(depths))))]
    for d, depth in depths.items():
        keys = int(d * num_heads_of_keys)
        for i in range(depth):
            columns = {"query": d, "key": keys, "value": keys, "output": d, "up": 4 * d}
            shapes += [(f"{d}_{i}_{name}/kernel", (d, n)) for name, n in columns.items()]
            shapes += [(f"{d}_{i}_{name}/bias", (n,)) for name, n in columns.items()]
            shapes += [(f"{d}_{i}_down/kernel", (4 * d, d)), (f"{d}_{i}_down/bias", (d,))]
            shapes += [(f"{d}_{i}_norm_{k}/{name}", (d,)) for k in range(2) for name in ("gamma", "beta")]
    return shapes


TRANSFORMERS = {
    "GPT-2 small": transformer({768: 12}, 50257),
    "pyramid (Swin)": transformer({96: 2, 192: 2, 384: 6, 768: 2}, 100),
    "grouped queries": transformer({1024: 8}, 32000, 1 / 8),
}


def newton_schulz(shape):
    """The floating-point operations of Muon's 5 iterations: X @ X.T, A @ A and B @ X."""
    small, large = sorted(shape)
    return 5 * (4 * small**2 * large + 2 * small**3)


@pytest.mark.exhaustive
def test_a_product_is_one_operation_with_its_flops_and_bytes():
    from keras_shardopt.backends.torch import work

    with work.without_memory():
        left, right = ops.zeros((2, 3)), ops.zeros((3, 4))
        assert work.count(lambda: left @ right) == (2 * 2 * 3 * 4 + 10 * 4 * (2 * 3 + 3 * 4 + 2 * 4), 1)


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_muons_ranks_compute_for_the_same_time(name, num_replicas):
    shapes = TRANSFORMERS[name]
    is_muons = [len(shape) == 2 and "embedding" not in path for path, shape in shapes]
    (bucket,) = buckets_of(
        keras.optimizers.Muon(), variables(shapes), [not whole for whole in is_muons], num_replicas, math.inf
    )
    flops = [sum(newton_schulz(shapes[p.variable][1]) for p in mine if is_muons[p.variable]) for mine in bucket.pieces]
    assert max(flops) <= 1.1 * np.mean(flops)
    # Muon calls 98 operations for a matrix, AdamW 70 for a bias.
    calls = [sum(98 if is_muons[p.variable] else 70 for p in mine) for mine in bucket.pieces]
    assert max(calls) <= 1.3 * np.mean(calls)
    elements = [sum(p.size for p in mine) for mine in bucket.pieces]
    assert max(elements) <= 1.03 * np.mean(elements)


def test_matrix_products_and_bytes_are_counted():
    shapes = [("a/kernel", (2**16, 2**20)), ("b/kernel", (64, 64)), ("b/bias", (64,))]
    (large, small, bias), (adam, *_) = [
        costs.update_costs(make(), variables(shapes)) for make in (keras.optimizers.Muon, keras.optimizers.Adam)
    ]
    assert 1.0 <= large[0] / newton_schulz((2**16, 2**20)) <= 1.1  # bytes take little of the time
    assert adam[0] < large[0] / 1000
    assert small[1] == large[1] > bias[1]
    assert small[0] < newton_schulz((64, 64)) + 10 * 4 * 64**2 * 200


class Own(keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * self.direction(gradient))


@functools.lru_cache
def identity(size):
    return ops.eye(size)


class Caching(Own):
    """Keeps a tensor for each shape. One without values would break the first update."""

    def direction(self, gradient):
        return gradient @ identity(int(gradient.shape[-1]))


def test_optimizers_of_users_are_not_tried_without_values():
    made = [keras.Variable(np.zeros(shape, "float32"), name="kernel") for shape in ((8, 512), (512, 8))]
    optimizer = Caching(0.1)
    assert costs.update_costs(optimizer, made) == [(4096, 1)] * 2
    optimizer.build(made)
    optimizer.apply([keras.ops.ones(v.shape) for v in made])
    assert keras.ops.ones(1).device.type != "meta"


def test_sizes_replace_what_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(costs._work, "count", lambda call: 1 / 0)
    made = variables([("a/kernel", (8, 512)), ("b/kernel", (512, 8))])
    assert costs.update_costs(keras.optimizers.Muon(), made) == [(4096, 1)] * 2


def test_each_kind_is_tried_once_and_element_wise_optimizers_never(monkeypatch):
    made = variables(TRANSFORMERS["GPT-2 small"])
    counted, real = [], costs._work.count
    monkeypatch.setattr(costs._work, "count", lambda call: counted.append(call) or real(call))
    costs.update_costs(keras.optimizers.Muon(), made)
    assert len(counted) == 6  # the embedding, three shapes of matrices, and two of vectors
    monkeypatch.setattr(separability, "fresh_copy", lambda *_, **__: 1 / 0)
    buckets_of(keras.optimizers.Adam(), made, [True] * len(made), 2, math.inf)
    assert len(counted) == 6


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_moving_averages_of_other_variables_are_not_counted(name):
    shapes = [(64, 64), (64, 256), (64,), (256,)]
    variables = [keras.Variable(np.zeros(shape, "float32"), name="w") for shape in shapes]
    make = getattr(keras.optimizers, name)
    plain, averaged = (costs.update_costs(make(0.01, use_ema=use_ema), variables) for use_ema in (False, True))
    assert averaged == plain
