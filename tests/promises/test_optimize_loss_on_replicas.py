"""Steps of `optimize_loss` on several replicas make the updates of one process with the whole batch."""

import contextlib
import functools
import json

import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import steps
from support import events, launch, problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.steps import optimize_loss as training
from keras_shardopt.steps.optimize_loss import TrainingStep
from keras_shardopt.summaries.tags import SUMMARIES

pytestmark = pytest.mark.timeout(300)


@functools.cache
def one_process(config):
    found, losses, step, _ = steps.trained(config, *problem.data(), problem.BATCH_SIZE, on_horovod=False)
    return found, losses, steps.scalars(step)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if BACKEND != "torch":
        return None
    file = tmp_path_factory.mktemp("steps") / "results.npz"
    launch.torchrun("rank_steps.py", 2, file, timeout=200)
    return dict(np.load(file)), json.loads(file.with_suffix(".json").read_text())


def on_devices(config):
    accumulates = "iter_size" in steps.CONFIGS[config]
    # One program on JAX, in which gradients are global as soon as they are there.
    with (
        ks.data_parallel(2) as replicas,
        pytest.warns(UserWarning, match="each micro-step communicates")
        if BACKEND == "jax" and accumulates
        else contextlib.nullcontext(),
    ):
        found, losses, step, model = steps.trained(config, *problem.data(), problem.BATCH_SIZE, on_horovod=True)
        difference, seen = replicas.largest_difference(model), steps.scalars(step)
    replicas.close()
    return difference, found, losses, seen


@pytest.mark.backends("tensorflow", "jax")
def test_summaries_of_fit_on_replicas(tmp_path):
    """One program serves all replicas here; on PyTorch each rank does what one process does."""

    def fit(folder, num_replicas):
        with ks.data_parallel(num_replicas) as replicas:
            model = problem.model()
            arguments = dict(clip_gradients=0.3, loss_scaling="Backoff", iter_size=2, cross_shard=True)
            model.compile(ks.build_optimizer("SGD", {}, 0.1, **arguments), "mse")
            model = ks.prepare(model)
            callback = ks.callbacks.TrainingSummaries(folder, list(SUMMARIES), every=2)
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


@pytest.mark.parametrize("config", some(steps.CONFIGS, ["keras.losses", "everything"], "jax", "tensorflow"))
def test_replicas_are_identical_and_equal_one_process(config, ranks):
    reference, losses, seen = one_process(config)
    if ranks is None:
        difference, found, their_losses, theirs_seen = on_devices(config)
        np.testing.assert_allclose(their_losses, losses, rtol=1e-5)
    else:  # the losses are those of rank 0
        results, everything_seen = ranks
        difference, theirs_seen = results[f"{config}/difference"], everything_seen[config]
        found = [results[f"{config}/{i}"] for i in range(len(reference))]
    assert difference == 0
    steps.check_equal(found, reference)
    assert theirs_seen == pytest.approx(seen, rel=1e-4)
    assert bool(seen) == (config == "everything")


def test_replicas_that_would_train_apart_are_refused(ranks):
    if ranks is not None:
        assert "on_horovod" in ranks[1]["refused"]
        return
    with ks.data_parallel(2) as replicas, pytest.raises(ValueError, match="on_horovod"):
        steps.trained("keras.losses", *problem.data(), problem.BATCH_SIZE, on_horovod=False)
    replicas.close()


@pytest.mark.backends("tensorflow", "jax")
def test_rows_that_do_not_divide_are_refused():
    with ks.data_parallel(2) as replicas, pytest.raises(ValueError, match="divide"):
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
            self._reducer.accumulation.num_steps = 1

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
