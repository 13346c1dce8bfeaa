"""Steps of `optimize_loss` on several replicas make the updates of one process with the whole batch."""

import functools
import json

import numpy as np
import pytest
from conftest import BACKEND
from support import launch, problem, steps

import keras_shardopt as ks

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
    with ks.data_parallel(2) as replicas:
        found, losses, step, model = steps.trained(config, *problem.data(), problem.BATCH_SIZE, on_horovod=True)
        difference, seen = replicas.largest_difference(model), steps.scalars(step)
    replicas.close()
    return difference, found, losses, seen


@pytest.mark.parametrize("config", steps.CONFIGS)
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
