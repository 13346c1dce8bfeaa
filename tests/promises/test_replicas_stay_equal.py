"""SyncReplicas and CheckReplicas where one process holds all replicas; ranks are in rank_checks.py."""

import importlib

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import flips
from support import problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, processes

several_devices = pytest.mark.backends("tensorflow", "jax")


def adam():
    return ks.CrossShard(keras.optimizers.Adam(0.01))


@pytest.fixture
def four_replicas():
    with ks.data_parallel(4) as replicas:
        yield replicas
    replicas.close()


def checking(model, every=100):
    check = ks.callbacks.CheckReplicas(every)
    check.set_model(model)
    return check


@several_devices
@pytest.mark.parametrize("num_trials", some([20, 100] if BACKEND == "jax" else [20], [20]))
@pytest.mark.exhaustive("tensorflow")
def test_one_flipped_bit_is_found_in_every_trial(four_replicas, num_trials):
    model = flips.trained_with_many_dtypes(adam, problem.data(1), batch_size=16)
    dtypes = {variable.dtype for variable in flips.compared(model)}
    wide = set() if BACKEND == "jax" else {"float64"}
    assert {"float32", "bfloat16", "float16"} | wide < dtypes and any("int" in dtype for dtype in dtypes)
    flips.check_trials(checking(model), model, 4, num_trials=num_trials)


@several_devices
@pytest.mark.exhaustive("tensorflow")
def test_equal_copies_pass_whatever_they_hold(four_replicas):
    model = flips.trained_with_many_dtypes(adam, problem.data(1), batch_size=16)
    for variable in model.trainable_weights[:3]:
        for replica in range(4):
            flips.change(variable, replica, lambda array: array.fill(np.nan))
    # Each replica's own, by nature.
    flips.flip(model.get_layer("normalize").moving_mean, 1, 0, 3)
    checking(model).check()


def check_that_a_swap_is_found(first, second):
    model = problem.model()
    model.compile(adam(), "mse")
    kernel = model.trainable_variables[0]
    start = kernel.numpy().copy()
    start[0, 0], start[3, 5] = first, second
    kernel.assign(start)
    check = checking(model)
    check.check()
    flips.swap(kernel, 2, 0, 3 * 7 + 5)
    with pytest.raises(RuntimeError, match="`mlp/hidden/kernel` on replica 2, against replicas 0, 1 and 3"):
        check.check()


@several_devices
@pytest.mark.parametrize("values", some([[1.0, 2.0], [0.25, -0.25], [0.0, -0.0]], [[0.25, -0.25]]))
def test_elements_that_changed_places_are_found(four_replicas, values):
    check_that_a_swap_is_found(*values)


@several_devices
def test_a_fingerprint_that_ignores_the_place_turns_that_check_red(four_replicas, monkeypatch):
    if BACKEND == "jax":
        from keras_shardopt.backends.jax import placement as module

        monkeypatch.setattr(module.jax.lax, "iota", lambda dtype, size: module.jax.numpy.zeros(size, dtype))
        module._fingerprints_on.cache_clear()
    else:
        from keras_shardopt.backends.tensorflow import placement as module

        plain = module.tf.function(
            lambda tensors: module.tf.stack([module.tf.reduce_sum(module._words(tensor)) for tensor in tensors])
        )
        monkeypatch.setattr(module, "_fingerprints", plain)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_that_a_swap_is_found(1.0, 2.0)
    if BACKEND == "jax":
        module._fingerprints_on.cache_clear()


@several_devices
def test_each_part_of_a_complex_number_counts():
    module = importlib.import_module(f"keras_shardopt.backends.{BACKEND}.placement")
    numbers = [keras.ops.convert_to_tensor(np.array([number], "complex64")) for number in (1 + 2j, 1, 2j)]
    parts = [np.asarray(module._words(number)) for number in numbers]
    bits = np.array([1, 2, 0], "float32").view("uint32")
    np.testing.assert_array_equal(parts, [bits[[0, 1]], bits[[0, 2]], bits[[2, 1]]])


@several_devices
def test_fit_stops_at_the_next_check(four_replicas):
    x, y = problem.data()
    model = problem.model()
    model.compile(adam(), "mse")

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                flips.flip(self.model.optimizer.variables[3], 1, 0, 9)

    seen = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    callbacks = [Break(), ks.callbacks.CheckReplicas(every=3), See()]
    with pytest.raises(RuntimeError, match="after 6 batches of this `fit`.* on replica 1, against replicas 0, 2 and 3"):
        model.fit(x, y, batch_size=problem.BATCH_SIZE, callbacks=callbacks, verbose=0)
    assert seen == [0, 1, 2, 3, 4]


@pytest.fixture
def counted(monkeypatch):
    """The numbers of variables of which fingerprints were taken."""
    calls = []
    real = placement.fingerprints

    def counting(variables):
        calls.append(len(variables))
        return real(variables)

    monkeypatch.setattr(placement, "fingerprints", counting)
    return calls


@pytest.mark.parametrize(
    ("every", "together", "checks"),
    [(4, 1, [4, 8, 12, 16, 20]), (7, 1, [7, 14, 20]), (1000, 1, [20]), (4, 3, [6, 10, 16, 20]), (10, 1, [10, 20])],
)
def test_how_often_it_checks(monkeypatch, every, together, checks):
    """Two epochs of ten batches, through which batches are counted, `together` of them in one execution."""
    model = problem.model()
    model.compile("sgd", "mse")
    check = checking(model, every)
    made = []
    monkeypatch.setattr(
        placement, "fingerprints", lambda variables: made.append(check._num_batches) or np.zeros((2, 9))
    )
    for _ in range(2):
        made.clear()
        check.on_train_begin()
        for epoch in range(2):
            check.on_epoch_begin(epoch)
            for start in range(0, 10, together):
                check.on_train_batch_end(min(start + together, 10) - 1)
        check.on_train_end()
        assert made == checks


def test_alone_it_looks_once_and_never_again(counted):
    model = problem.model()
    model.compile("sgd", "mse")
    x, y = problem.data(4)
    model.fit(x, y, batch_size=16, callbacks=[ks.callbacks.CheckReplicas(1)], verbose=0)
    assert len(counted) == 1


def test_groups_are_compared_within(monkeypatch):
    model = problem.model()
    model.compile("sgd", "mse")
    model.optimizer.group_assignment = [[0, 1], [2, 3]]
    num_variables = 4 + len(model.optimizer.variables)
    rows = np.repeat(np.array([[1], [1], [2], [2]], "uint64"), num_variables, axis=1)
    monkeypatch.setattr(placement, "fingerprints", lambda variables: rows)
    checking(model).check()
    rows[3, 1] = 9
    with pytest.raises(RuntimeError, match="`mlp/hidden/bias` on replica 2 against replica 3"):
        checking(model).check()
    model.optimizer.group_assignment = None
    with pytest.raises(RuntimeError, match="replicas 0 and 1 against replicas 2 and 3"):
        checking(model).check()


def test_groups_inside_other_wrappers_are_found(monkeypatch):
    model = problem.model()
    model.compile(ks.LossScaling(ks.CrossShard("sgd", group_assignment=[[0, 1], [2, 3]]), 8.0), "mse")
    rows = np.repeat(np.array([[1], [1], [2], [2]], "uint64"), 4 + len(model.optimizer.variables), axis=1)
    monkeypatch.setattr(placement, "fingerprints", lambda variables: rows)
    checking(model).check()


def test_each_optimizer_has_groups_of_its_own(monkeypatch):
    """Of three optimizers two have groups, which are not the same, and one has none."""
    model = problem.model()
    model.compile("sgd", "mse")
    model.optimizers = [
        ks.CrossShard("sgd", group_assignment=[[0, 1], [2, 3]]),
        ks.CrossShard("sgd", group_assignment=[[0, 2], [1, 3]]),
        ks.CrossShard("sgd"),
    ]
    for optimizer, variable in zip(model.optimizers, model.trainable_variables):
        optimizer.build([variable])
    num_variables = 4 + sum(len(o.variables) for o in [model.optimizer, *model.optimizers])
    rows = np.zeros((4, num_variables), "uint64")
    monkeypatch.setattr(placement, "fingerprints", lambda variables: rows)
    rows[:, 0], rows[:, 1] = [1, 1, 2, 2], [1, 2, 1, 2]
    rows[:, 3] = [1, 2, 3, 4]  # of a weight that none of them updates: each of two assignments lets it differ
    checking(model).check()
    rows[:, 1] = rows[:, 0]
    with pytest.raises(RuntimeError, match="`mlp/hidden/bias` on replica 0 against replica 2"):
        checking(model).check()
    rows[:, 1], rows[:, 2] = 0, rows[:, 0]
    with pytest.raises(RuntimeError, match="`mlp/out/kernel` on replicas 0 and 1 against replicas 2 and 3"):
        checking(model).check()


def test_a_long_list_of_names_is_cut(monkeypatch):
    model = problem.model()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    rows = np.zeros((3, 14), "uint64")
    rows[2] = 1
    monkeypatch.setattr(placement, "fingerprints", lambda variables: rows)
    with pytest.raises(
        RuntimeError, match="`mlp/out/bias` on replica 2, against replicas 0 and 1.* and 6 more"
    ) as caught:
        checking(model).check()
    assert str(caught.value).count(" on replica 2") == 8


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_every_must_be_a_positive_int(every, error):
    with pytest.raises(error, match=f"`every` must .*Received: every={every}"):
        ks.callbacks.CheckReplicas(every)
    assert ks.callbacks.CheckReplicas(np.int64(7)).every == 7


WATCHERS = {
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("loss"),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss"),
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint("never.keras", "loss"),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_callbacks_that_watch_a_metric_must_come_after(watcher):
    x, y = problem.data(1)
    model = problem.model()
    model.compile("sgd", "mse")
    callbacks = [keras.callbacks.TerminateOnNaN(), WATCHERS[watcher](), ks.callbacks.SyncReplicas()]
    with pytest.raises(ValueError, match=f"must stand before .* Received: `{watcher}` before `SyncReplicas`"):
        model.fit(x, y, callbacks=callbacks, verbose=0)
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        np.testing.assert_array_equal(weight, start)


def fit_with_peers(monkeypatch, peers, *others):
    """Fits as the first of several processes; `peers` makes the others' logs from this one's."""
    monkeypatch.setattr(processes, "gather_objects", lambda logs: [logs, *peers(logs)])
    x, y = problem.data(2)
    model = problem.model()
    model.compile("sgd", "mse")
    callbacks = [ks.callbacks.SyncReplicas(), *others]
    return model.fit(x, y, batch_size=16, epochs=3, validation_data=(x, y), callbacks=callbacks, verbose=0).history


def test_logs_are_averaged_for_what_comes_after_and_for_the_history(monkeypatch):
    seen = []

    class See(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    own = []

    def peers(logs):
        own.append(logs)
        return [{**logs, "val_loss": 4.0}, {**logs, "val_loss": float(len(own))}]

    history = fit_with_peers(monkeypatch, peers, See())
    expected = [(logs["val_loss"] + 4 + epoch) / 3 for epoch, logs in enumerate(own, 1)]
    np.testing.assert_allclose([logs["val_loss"] for logs in seen], expected, rtol=1e-12)
    assert history["val_loss"] == [logs["val_loss"] for logs in seen]
    assert history["loss"] == [logs["loss"] for logs in own]  # equal on all, so to the last bit


def test_a_nan_on_one_process_is_a_nan_for_all(monkeypatch):
    history = fit_with_peers(monkeypatch, lambda logs: [{**logs, "loss": float("nan")}])
    assert np.isnan(history["loss"]).all() and np.isfinite(history["val_loss"]).all()


def test_processes_must_log_the_same(monkeypatch):
    with pytest.raises(ValueError, match=r"\['loss', 'val_loss'\] on process 0, \['loss'\] on process 1"):
        fit_with_peers(monkeypatch, lambda logs: [{"loss": logs["loss"]}])


def test_alone_it_changes_nothing():
    def run(*callbacks):
        x, y = problem.data(4)
        model = problem.model()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, callbacks=list(callbacks), verbose=0).history
        return model.get_weights(), history

    weights, history = run(ks.callbacks.SyncReplicas(), ks.callbacks.CheckReplicas(1))
    plain_weights, plain_history = run()
    assert history == plain_history
    for a, b in zip(weights, plain_weights):
        np.testing.assert_array_equal(a, b)


@pytest.mark.neutral
def test_weights_of_frozen_layers_are_compared_and_moving_statistics_are_not(monkeypatch):
    layers = [keras.layers.Dense(2, name="frozen"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    layers[0].trainable = False
    model.compile(ks.CrossShard("sgd"), "mse")
    model.optimizer.build(model.trainable_variables)
    compared = []

    def fingerprints(variables):
        compared.extend(id(variable) for variable in variables)
        return np.zeros((2, len(variables)), "uint64")

    monkeypatch.setattr(placement, "fingerprints", fingerprints)
    checking(model).check()
    assert {id(v) for layer in (layers[0], layers[2]) for v in layer.weights} <= set(compared)
    assert not {id(v) for v in layers[1].non_trainable_weights} & set(compared)
