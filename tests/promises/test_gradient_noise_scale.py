"""`summaries=["gradient_noise_scale"]` shows the noise scale of a problem where it is known."""

import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import noise
from support.suites import some

import keras_shardopt as ks

NUM_REPLICAS = {"tensorflow": 2, "jax": 4, "torch": 2}


@pytest.mark.parametrize("case", some(noise.CASES, ["plain"] if BACKEND == "tensorflow" else ["plain", "accumulating"]))
def test_on_replicas_it_is_that_of_the_problem(world, case):
    found, left = world.run(noise.on_replicas, NUM_REPLICAS[BACKEND], case, of=noise.CASES)
    num_micro_batches = noise.CASES[case].get("gradient_accumulation_steps", 1)
    assert found[""] == pytest.approx(noise.TRUTH, rel=0.1)
    assert found["_in_batches"] == pytest.approx(found[""] / noise.BATCH_SIZE / num_micro_batches, rel=1e-4)
    assert not left


@pytest.mark.exhaustive("tensorflow", "torch")
def test_on_one_replica_it_is_that_of_its_micro_batches():
    found, _ = noise.trained("one replica", 1, *noise.rows(4), noise.BATCH_SIZE, gradient_accumulation_steps=4)
    assert set(found) == {"_in_batches"}  # nobody knows how many rows a batch has
    assert found["_in_batches"] * 4 * noise.BATCH_SIZE == pytest.approx(noise.TRUTH, rel=0.1)


class Ending(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


@pytest.mark.exhaustive("tensorflow")
def test_after_a_training_that_has_failed_nothing_is_left():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(ks.CrossShard("sgd", gradient_accumulation_steps=2), "mse")
    fit = functools.partial(model.fit, np.ones((8, 1)), np.ones((8, 1)), batch_size=2, verbose=0)
    fit()
    stages, needing = list(model.optimizer.pipeline.stages), list(model.optimizer.state_finder.needing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit(callbacks=[ks.callbacks.TrainingSummaries(None, ["gradient_noise_scale"]), Ending()])
    assert len(model.optimizer.pipeline.stages) == len(stages) + 1
    fit(callbacks=[ks.callbacks.TrainingSummaries(None, ["gradient_noise_scale"])])
    assert model.optimizer.pipeline.stages == stages and model.optimizer.state_finder.needing == needing


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda: ks.CrossShard("sgd"),
            "compares the gradients of several replicas or micro-batches. Received: 1",
        ),
        (lambda: ks.LARC(keras.optimizers.SGD(), 0.1), r"requires a `CrossShard`.*Use `CrossShard\(LARC"),
        (
            lambda: ks.CrossShard("sgd", reduction="sum", gradient_accumulation_steps=2),
            "not support `shard_state`",
        ),
    ],
)
def test_where_nothing_can_be_compared_it_says_so(optimizer, message):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer(), "mse")
    watching = ks.callbacks.TrainingSummaries(None, ["gradient_noise_scale"])
    with pytest.raises(ValueError, match=message):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[watching])


@pytest.mark.backends("jax")
def test_on_devices_without_prepare_the_error_names_it():
    with ks.data_parallel(2, prepare=False) as replicas:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(ks.CrossShard("sgd"), "mse")
        watching = ks.callbacks.TrainingSummaries(None, ["gradient_noise_scale"])
        with pytest.raises(ValueError, match=r"Received: summaries=\[\"gradient_noise_scale\"\].*prepare"):
            model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[watching])
    replicas.close()
