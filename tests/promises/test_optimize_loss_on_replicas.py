"""Steps of `optimize_loss` on several replicas make the updates of one process with the whole batch."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from promises.problems import steps
from support import events, problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends import for_backend
from keras_shardopt.classic.steps import optimize_loss as training
from keras_shardopt.classic.steps.optimize_loss import TrainingStep
from keras_shardopt.classic.summaries.tags import SUMMARIES

pytestmark = pytest.mark.timeout(300)

compiling = for_backend({"jax": "keras_shardopt.classic.steps.jax"})


@functools.cache
def one_process(config):
    found, losses, step, _ = steps.trained(config, *problem.data(), problem.BATCH_SIZE, on_horovod=False)
    return found, losses, steps.scalars(step)


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.exhaustive("tensorflow")
def test_summaries_of_fit_on_replicas(tmp_path):
    """One program serves all replicas here; on PyTorch each rank does what one process does."""

    def fit(folder, num_replicas):
        with ks.data_parallel(num_replicas) as replicas:
            model = problem.model()
            arguments = dict(clip_gradients=0.3, loss_scaling="Backoff", iter_size=2, cross_shard=True)
            model.compile(ks.build_optimizer("SGD", {}, 0.1, **arguments), "mse")
            model = ks.prepare(model)
            callback = ks.callbacks.TrainingSummaries(
                folder, [name for name in SUMMARIES if name != "gradient_noise_scale"], every=2
            )
            model.fit(*problem.data(num_steps=8), batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
            assert replicas.largest_difference(model) == 0
        replicas.close()
        return events.read(folder)

    one, two = fit(tmp_path / "one", 1), fit(tmp_path / "two", 2)
    assert set(one) == set(two)
    for tag, values in one.items():
        assert [step for step, _ in values] == [step for step, _ in two[tag]] == [2, 4]
        for (_, value), (_, other) in zip(values, two[tag]):
            assert other == pytest.approx(value, rel=1e-4), tag


@pytest.mark.backends("jax")
def test_variables_keep_their_layout_in_a_step():
    """Otherwise the second step compiles again, because the first one left the variable divided, like the batch."""
    with ks.data_parallel(2):
        copy = keras.Variable(np.zeros((4, 3), "float32"), trainable=False)
        step = compiling.compile_step(lambda batch: [copy.assign(batch), ops.sum(batch)][1], [copy], None)
        for number in (1.0, 2.0):
            step(np.full((4, 3), number, "float32"))
            assert copy.value.sharding.is_fully_replicated
            np.testing.assert_array_equal(copy, number)
    assert step._program({})._cache_size() == 1


@pytest.mark.backends("jax")
def test_a_variable_that_a_step_finds_is_placed_on_all_devices():
    counter = keras.Variable(0.0, trainable=False)  # created before the devices are known, so on one device
    with ks.data_parallel(2):
        step = compiling.compile_step(lambda batch: [counter.assign_add(1.0), ops.sum(batch)][1], [], None)
        assert float(step(np.ones((4, 3), "float32"))) == 12
        assert counter.value.sharding.is_fully_replicated and len(counter.value.sharding.device_set) == 2
        assert float(counter) == 1


@pytest.mark.parametrize("config", some(steps.CONFIGS, ["everything"], "jax", "tensorflow"))
def test_replicas_are_identical_and_equal_one_process(world, config):
    reference, losses, seen = one_process(config)
    warns = contextlib.nullcontext()
    if BACKEND == "jax" and "iter_size" in steps.CONFIGS[config]:
        # One program, in which gradients are global as soon as they are there.
        warns = pytest.warns(UserWarning, match="each micro-batch communicates")
    with warns:
        difference, found, their_losses, theirs_seen = world.run(steps.on_replicas, 2, config, of=steps.ON_REPLICAS)
    if world.kind == "devices":  # others are the losses of one rank
        np.testing.assert_allclose(their_losses, losses, rtol=1e-5)
    assert difference == 0
    steps.check_equal(found, reference)
    assert theirs_seen == pytest.approx(seen, rel=1e-4)
    assert bool(seen) == (config == "everything")


def test_replicas_that_would_train_apart_are_refused(world):
    assert "on_horovod" in world.run(steps.on_replicas, 2, steps.APART, of=steps.ON_REPLICAS)


@pytest.mark.backends("tensorflow", "jax")
def test_rows_that_do_not_divide_are_refused():
    with ks.data_parallel(2) as replicas, pytest.raises(ValueError, match="divisible"):
        x, y = problem.data(num_steps=1)
        steps.trained("keras.losses", x[:7], y[:7], 7, on_horovod=True)
    replicas.close()


@pytest.mark.exhaustive("jax", "tensorflow")
@pytest.mark.parametrize("fault", ["none", "twice", "dropped", "window of one"])
def test_planted_faults_are_found(fault, monkeypatch):
    """What `check_equal` would see if gradients counted twice, were lost, or were not accumulated."""
    reference, _, _ = one_process("everything")
    real = TrainingStep.__init__

    def init(self, *args):
        real(self, *args)
        if fault == "window of one":
            self._cross_shard.accumulation.window.num_steps = 1

    def gradients(*args):
        grads, value = real_gradients(*args)
        if fault == "twice":
            grads = [2 * g for g in grads]
        elif fault == "dropped":
            grads = [0 * grads[0], *grads[1:]]
        return grads, value

    real_gradients = training.runtime.value_and_grad
    monkeypatch.setattr(TrainingStep, "__init__", init)
    monkeypatch.setattr(training.runtime, "value_and_grad", gradients)
    found, _, _, _ = steps.trained("everything", *problem.data(), problem.BATCH_SIZE, on_horovod=False)
    with contextlib.nullcontext() if fault == "none" else pytest.raises(AssertionError):
        steps.check_equal(found, reference)
