"""With synchronised batch normalisation replicas make the updates of one process with the whole batch."""

import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import normalizing, uneven
from support import problem
from support.suites import some

import keras_shardopt as ks

ON_JAX = ["gradients of each replica", "accumulated gradients of each replica"]
NAMES = [
    name
    for name in normalizing.CASES
    if (BACKEND == "jax" or name not in ON_JAX) and (BACKEND != "torch" or name != "few rows")
]
SAME = [name for name in NAMES if name not in ("mixed precision", "far from zero") and "apart" not in name]
BY_DEFAULT = {"jax": ["mask", "few rows", ON_JAX[0]], "tensorflow": ["few rows", "skipped update"], "torch": SAME}[
    BACKEND
]
CASES = [*[(name, 3) for name in SAME], *[(name, (2, 4)[i % 2]) for i, name in enumerate(SAME)]]


@functools.cache
def alone(name):
    """What one process comes to, with layers of Keras as they are."""
    return normalizing.trained(None, name, converts=False)


@pytest.mark.parametrize(("name", "num_replicas"), some(CASES, [(name, 3) for name in BY_DEFAULT]))
def test_update_is_that_of_one_process(world, name, num_replicas):
    got = world.run(normalizing.trained, num_replicas, name, of=NAMES)
    normalizing.assert_same(got, alone(name))


@pytest.mark.exhaustive("jax", "tensorflow")
def test_so_it_is_in_half_precision_as_far_as_that_goes(world):
    got = world.run(normalizing.trained, 3, "mixed precision", of=NAMES)
    normalizing.assert_same(got, alone("mixed precision"), tolerance=0.03)


@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.exhaustive("tensorflow")
def test_layers_that_are_left_alone_use_the_rows_of_their_replica(world):
    """Otherwise nothing above shows anything."""
    got = world.run(normalizing.trained, 3, "apart", of=NAMES)
    with pytest.raises(AssertionError):
        normalizing.assert_same(got, alone("branches"), tolerance=0.1)


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("name", some(["apart, few rows", "apart, skipped update"], ["apart, few rows"]))
def test_moving_statistics_of_layers_that_are_left_alone_are_the_mean_of_all_replicas(world, name):
    """Those of each replica's rows, which count by their number; Keras shows those of the first replica."""
    case = normalizing.CASES[name]
    (_, found), _ = world.run(normalizing.trained, 3, name, of=NAMES)
    x = case.get("data", uneven.data)()[0][case.get("rows", slice(None))].astype("float64")
    mean, variance = np.zeros(problem.NUM_FEATURES), np.ones(problem.NUM_FEATURES)
    for begin in range(0, len(x), uneven.BATCH_SIZE):
        batch = x[begin : begin + uneven.BATCH_SIZE]
        rows = -(-len(batch) // 3)
        if np.isfinite(batch).all():
            parts = [part for part in (batch[r * rows : (r + 1) * rows] for r in range(3)) if len(part)]
            counts = [len(part) for part in parts]
            mean = 0.5 * mean + 0.5 * np.average([np.mean(part, axis=0) for part in parts], axis=0, weights=counts)
            variance = 0.5 * variance + 0.5 * np.average([np.var(p, axis=0) for p in parts], axis=0, weights=counts)
    np.testing.assert_allclose(found, [mean, variance], rtol=1e-5)


def test_a_large_mean_costs_no_digits(world):
    (_, (mean, variance)), _ = world.run(normalizing.trained, 3, "far from zero", of=NAMES)
    batches = uneven.batches()
    rows = normalizing.far_from_zero()[0][batches[-1]].astype("float64")
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-3)


class EachNumber(keras.layers.Layer):
    """Normalises numbers, each of which is a row."""

    def __init__(self):
        super().__init__()
        self.normalize = keras.layers.BatchNormalization()

    def call(self, x, training=None):
        return keras.ops.reshape(self.normalize(keras.ops.reshape(x, (-1, 1)), training=training), keras.ops.shape(x))


@pytest.mark.backends("jax")
def test_rows_that_may_be_padding_and_cannot_be_told_are_refused():
    def make():
        return keras.Sequential([keras.Input((2,)), EachNumber()])

    x = np.ones((13, 2), "float32")
    with ks.data_parallel(4) as replicas:
        model = normalizing.compiled(make, around={"replica_clipnorm": 1e9})
    with pytest.raises(ValueError, match="Received: 8 entries on a replica that has 4 rows of 13"):
        model.train_on_batch(x, x)
    replicas.close()


# A layer that gets padded rows, the loss, and the words of the error.
WITH_PADDING = {
    "another layer": (
        lambda: keras.layers.BatchNormalization(name="apart"),
        "mse",
        "Received: 'apart', unsynchronized",
    ),
    "added loss": (uneven.AddsLoss, "mse", r"Received: 1 added loss\(es\)"),
    "scalar loss": (lambda: keras.layers.Dense(2), lambda y, p: keras.ops.mean(y - p), "Received: a scalar"),
}


@pytest.mark.backends("jax")
@pytest.mark.parametrize("name", WITH_PADDING)
def test_with_a_synchronized_layer_others_that_would_count_padding_are_refused(name):
    make, loss, words = WITH_PADDING[name]
    x = np.ones((13, 2), "float32")
    with ks.data_parallel(4) as replicas:
        layers = [keras.layers.BatchNormalization(synchronized=True), make()]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(ks.CrossShard("sgd", replica_clipnorm=1.0), loss)
    with pytest.raises(ValueError, match=f"{words}.* 13 rows on 4 replicas.* (multiple|batch size)"):
        model.train_on_batch(x, x)
    model.train_on_batch(x[:12], x[:12])
    replicas.close()


@pytest.mark.backends("jax")
def test_a_shard_map_of_ones_own_is_warned_of():
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.build((None, 2))

    def own(x):
        with keras.StatelessScope():
            return layer(x, training=True)

    divided = jax.sharding.PartitionSpec("batch")
    run = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=divided, out_specs=divided))
    with pytest.warns(
        UserWarning, match="exchanges statistics only in `fit` and `train_on_batch` of a model passed to"
    ):
        run(np.ones((4, 2), "float32"))


ON_RANKS = ["sent in the backward pass", "sent late on one rank", "one rank alone", "compiled"]


@pytest.mark.backends("torch")
@pytest.mark.parametrize("name", some(ON_RANKS, lambda name: name != "compiled"))
def test_gradients_and_statistics_do_not_get_into_each_others_way(world, name):
    names = [name] if name == "compiled" else [name for name in ON_RANKS if name != "compiled"]
    got = world.run(on_ranks, 3, name, of=names)
    normalizing.assert_same(got, alone("branches"))


def on_ranks(replicas, name):
    """What a rank does for the test above."""
    import contextlib
    import warnings

    import torch
    import torch.distributed as dist

    from keras_shardopt.backends.torch import overlap

    calls, all_reduce, follow = [], dist.all_reduce, overlap.Buckets.follow

    def recorded(tensor, *args, **kwargs):
        if torch._C._current_graph_task_id() >= 0:
            calls.append("statistics" if kwargs.get("group") is not None else "gradients")
        return all_reduce(tensor, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, dist, "all_reduce", all_reduce)
        stack.callback(setattr, overlap.Buckets, "follow", follow)
        dist.all_reduce = recorded
        if name == "sent late on one rank" and replicas.replica_id == 1:
            overlap.Buckets.follow = lambda *_: None
        around = {"around": {"bucket_mib": 1e-4}}
        if name == "one rank alone":
            layer = keras.layers.BatchNormalization(synchronized=True)
            if replicas.replica_id == 0:  # which alone warns
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    for _ in range(2):
                        layer(np.ones((4, 2), "float32"), training=True)
                (words,) = [str(each.message) for each in caught]
                assert f"Received: the layer {layer.name!r} in training mode elsewhere" in words
                model = normalizing.compiled()
                model.predict(np.ones((4, problem.NUM_FEATURES), "float32"), verbose=0)
            return normalizing.trained(replicas, "branches", **around)
        if name == "compiled":
            stack.enter_context(problem.without_generated_code())
            return normalizing.trained(replicas, "branches", jit_compile=True)
        found = normalizing.trained(replicas, "branches", **around)
    if name == "sent late on one rank" and replicas.replica_id == 1:
        assert set(calls) == {"statistics"}, calls
    else:  # after the first step, gradients of the last layer come first
        assert calls[:4] == ["statistics"] * 3 + ["gradients"], calls
    return found
