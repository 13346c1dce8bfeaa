"""TensorFlow: two workers of a `MultiWorkerMirroredStrategy` equal one process with the whole batch."""

import keras
import numpy as np
import pytest
from promises.problems import uneven
from support import launch, problem

import keras_shardopt as ks

pytestmark = [pytest.mark.backends("tensorflow"), pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]


def test_two_workers_in_a_loop_by_hand(tmp_path):
    file = tmp_path / "results.npz"
    with pytest.raises(launch.WorkersFailed, match="worker 0 has noticed") as failure:
        launch.tensorflow_workers("tf_worker.py", 2, file, timeout=200, grace=30)
    # The one that was to be killed, and no other.
    assert "worker 0, exit status 0\n" in str(failure.value) and "worker 1, exit status -9\n" in str(failure.value)
    found = list(np.load(file).values())
    model = problem.model()
    model.compile(problem.sgd_momentum(), "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(found[:4], model.get_weights()) <= problem.TOLERANCE
    slots = [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]
    assert found[4] == slots[0] == problem.NUM_STEPS  # the update counter, then the rate
    start = [np.zeros_like(slot) for slot in slots[2:]]
    assert problem.relative_difference(found[6:], slots[2:], start) <= problem.TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two workers with two devices each have left, which called `fit`."""
    made = tmp_path_factory.mktemp("fit")
    try:
        launch.tensorflow_workers("tf_fit.py", 2, made, timeout=200)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    return made


@pytest.fixture(scope="module")
def results(folder):
    return np.load(folder / "results.npz")


@pytest.fixture(scope="module")
def reference():
    model = problem.model()
    model.compile(problem.sgd_momentum(), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError(name="root")])
    x, y = problem.data()
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: model.batches.append(logs))
    model.batches = []
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0, callbacks=[note])
    return model


def test_fit_equals_one_process(results, reference):
    x, y = problem.data()
    found = [results[f"variable{i}"] for i in range(10)]
    assert problem.relative_difference(found[:4], reference.get_weights()) <= problem.TOLERANCE
    slots = [keras.ops.convert_to_numpy(v) for v in reference.optimizer.variables]
    assert found[4] == slots[0] == problem.NUM_STEPS  # the update counter, then the rate
    start = [np.zeros_like(slot) for slot in slots[2:]]
    assert problem.relative_difference(found[6:], slots[2:], start) <= problem.TOLERANCE
    for name, value in reference.evaluate(x, y, batch_size=16, verbose=0, return_dict=True).items():
        np.testing.assert_allclose(results[name], value, rtol=1e-5)
    batches = [[logs[name] for name in sorted(logs)] for logs in reference.batches]
    np.testing.assert_allclose(results["batches"], batches, rtol=1e-5)
    np.testing.assert_allclose(results["history"], reference.history.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(results["predicted"], reference.predict(x[:37], verbose=0), rtol=1e-5, atol=1e-6)


def test_what_the_first_worker_saved_loads_elsewhere(folder, results):
    model = keras.saving.load_model(folder / "model.keras")
    for i, variable in enumerate([*model.trainable_variables, *model.optimizer.variables]):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), results[f"variable{i}"])


def test_workers_give_their_own_rows_to_a_call_for_one_batch(folder, results):
    model = keras.saving.load_model(folder / "model.keras")
    x, y = problem.data()
    losses = model.test_on_batch(x[:16], y[:16])[0], model.train_on_batch(x[:16], y[:16])[0]
    np.testing.assert_allclose(results["on_batch"], losses, rtol=1e-5)
    start, end = results["variable0"], model.trainable_variables[0].numpy()
    assert problem.relative_difference([results["after_batch"]], [end], [start]) <= 5 * problem.TOLERANCE  # 1 step


@pytest.mark.parametrize("division", ["divided", "some_without"])
def test_a_worker_with_fewer_rows_or_batches(division, results):
    alone = uneven.run("divided by weights", 1)
    weights = [results[f"{division}/weight{i}"] for i in range(4)]
    uneven.assert_same((weights, {name: results[f"{division}/log/{name}"] for name in alone[1]}), alone)


def test_steps_per_epoch_and_wrappers_and_accumulation(results):
    model = problem.model()
    inner = ks.LossScaling(ks.GradientClipping(problem.sgd_momentum(), 1.0))
    model.compile(ks.CrossShard(inner, gradient_accumulation_steps=2, on_nonfinite="skip"), "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    found = [results[f"stepping{i}"] for i in range(4)]
    assert problem.relative_difference(found, model.get_weights()) <= problem.TOLERANCE
