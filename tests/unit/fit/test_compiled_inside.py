"""Models that are compiled, or loaded, inside `data_parallel()` are prepared; what cannot be is warned of."""

import inspect

import keras
import numpy as np
import pytest
from promises.problems import gan
from support import problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.models import is_prepared

with_devices = pytest.mark.backends("tensorflow", "jax")


def compiled(model=None, optimizer=None):
    model = problem.model() if model is None else model
    model.compile(ks.CrossShard(problem.sgd_momentum()) if optimizer is None else optimizer, "mse")
    return model


@with_devices
@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
def test_the_first_program_of_the_readme_is_that_of_one_process(num_replicas):
    """Batches that do not divide, without a further call."""
    x, y = (rows[:61] for rows in problem.data(4))

    def trained(num_replicas):
        with ks.data_parallel(num_replicas) as replicas:
            model = compiled()
        history = model.fit(x, y, batch_size=problem.BATCH_SIZE, validation_split=0.1, shuffle=False, verbose=0)
        replicas.close()
        return model.get_weights(), history.history

    (weights, logs), (mine, my_logs) = trained(1), trained(num_replicas)
    assert problem.relative_difference(mine, weights) <= problem.TOLERANCE
    for name in logs:
        np.testing.assert_allclose(my_logs[name], logs[name], rtol=1e-5)


@with_devices
def test_compile_and_load_model_prepare_inside_and_nowhere_else(tmp_path):
    with ks.data_parallel(2) as replicas:
        model = compiled()
        assert is_prepared(model)
        assert is_prepared(compiled(optimizer=ks.CrossShard("adam")))
        model.save(tmp_path / "model.keras")
        assert is_prepared(keras.saving.load_model(tmp_path / "model.keras"))
        assert not is_prepared(compiled(optimizer="sgd"))
        assert not is_prepared(compiled(optimizer=ks.CrossShard("sgd", group_assignment=[[0], [1]])))
        with ks.data_parallel(2, prepare=False):
            assert not is_prepared(compiled())
        assert is_prepared(compiled())
    outside = compiled()
    assert not is_prepared(outside)
    before = model.fit
    assert ks.prepare(model) is model and model.fit == before  # harmless on one that is prepared
    replicas.close()


def test_nothing_changes_for_one_replica():
    compile_in_keras, outside = keras.Model.compile, compiled()
    with ks.data_parallel(1):
        model = compiled()
    assert keras.Model.compile is compile_in_keras
    assert not is_prepared(model)
    assert set(vars(model)) == set(vars(outside))


@pytest.mark.backends("torch")
def test_several_steps_per_execution_are_those_of_one_on_one_replica_too(tmp_path):
    """Keras refuses them on PyTorch, so that a script for several ranks would fail without torchrun."""
    x, y = problem.data(4)

    def trained(**arguments):
        with ks.data_parallel(1):
            model = problem.model()
            model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", **arguments)
        history = model.fit(x, y, batch_size=problem.BATCH_SIZE, validation_data=(x, y), shuffle=False, verbose=0)
        logs = [model.evaluate(x, y, verbose=0), model.train_on_batch(x, y), model.test_on_batch(x, y)]
        return model, [*model.get_weights(), model.predict(x, verbose=0), model.predict_on_batch(x)], history, logs

    (_, values, history, logs), (model, mine, my_history, my_logs) = trained(), trained(steps_per_execution=3)
    for one, other in zip(mine, values, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (my_history.history, my_logs) == (history.history, logs)
    assert model.steps_per_execution == 3 and not is_prepared(model)
    model.save(tmp_path / "model.keras")
    with ks.data_parallel(1):
        keras.saving.load_model(tmp_path / "model.keras").evaluate(x, y, verbose=0)


class Looks(keras.callbacks.Callback):
    """Notes the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))


@with_devices
@pytest.mark.parametrize("steps_per_execution", some([1, 2], [1]))
@pytest.mark.exhaustive("tensorflow")
def test_logs_of_batches_are_those_of_all_replicas(steps_per_execution, capsys):
    """Also of a metric that is no mean over rows, whose mean over replicas is another number."""
    x, y = (rows[:61] for rows in problem.data(4))
    x, y = x, (y[:, :1] > 0).astype("float32")

    def trained(num_replicas):
        keras.utils.set_random_seed(4)
        with ks.data_parallel(num_replicas) as replicas:
            model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1, activation="sigmoid")])
            optimizer = ks.CrossShard(problem.sgd_momentum())
            model.compile(optimizer, "mse", metrics=["AUC"], steps_per_execution=steps_per_execution)
        looks = Looks()
        model.fit(x, y, 13, epochs=2, validation_data=(x, y), callbacks=[looks], shuffle=False, verbose=0)
        capsys.readouterr()
        model.fit(x, y, 13, epochs=1, shuffle=False, verbose=1)
        shown = capsys.readouterr().out.replace("\x08", "").replace("\r", "\n").split("\n")
        replicas.close()
        bars = [line.split(" - ", 1)[1].split("step - ")[-1].strip() for line in shown if "loss:" in line]
        return looks.seen, bars

    (expected, bars), (seen, my_bars) = trained(1), trained(2)
    assert len(seen) == len(expected) > 8
    for mine, whole in zip(seen, expected):
        assert mine.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-5, err_msg=name)
    assert my_bars[-1] == bars[-1]  # which batches it shows before is a matter of time


@with_devices
def test_compile_is_keras_own_again_after_the_block():
    before = keras.Model.compile
    with pytest.raises(KeyError), ks.data_parallel(2):
        assert keras.Model.compile is not before
        raise KeyError
    assert keras.Model.compile is before
    assert list(inspect.signature(before).parameters)[:3] == ["self", "optimizer", "loss"]


class CompilesLater(keras.Sequential):
    """Has its loss, and no optimizer, when Keras' `compile` is through, as Keras' guides on `train_step` do."""

    def compile(self, my_optimizer):
        super().compile(loss="mse")
        self.my_optimizer = my_optimizer

    def train_step(self, *arguments):
        return super().train_step(*arguments)


@with_devices
def test_optimizers_that_come_after_keras_compile_are_found():
    with ks.data_parallel(2) as replicas:
        model = CompilesLater(problem.model().layers)
        model.compile(ks.CrossShard("sgd"))
        assert not is_prepared(model)
        two = gan.compiled(gan.one_divided)
    assert is_prepared(model) and is_prepared(two)
    with ks.data_parallel(2) as replicas:
        model = CompilesLater(problem.model().layers)
        model.compile(ks.CrossShard("sgd"))
        model.fit(*problem.data(1), batch_size=problem.BATCH_SIZE, verbose=0)
        assert is_prepared(model)
    replicas.close()


@pytest.mark.backends("tensorflow")
def test_a_model_made_before_the_scope_is_refused_by_compile():
    model = problem.model()
    with ks.data_parallel(2), pytest.raises(ValueError, match="was made outside the strategy"):
        compiled(model)
    with ks.data_parallel(1):
        pass


@pytest.mark.backends("torch")
def test_a_plain_model_of_a_process_that_torchrun_started_trains_by_itself(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


@pytest.mark.exhaustive("tensorflow")
def test_another_compile_trains_with_another_loss_and_optimizer():
    x, y = problem.data(1)
    with ks.data_parallel(None if keras.config.backend() == "torch" else 2):
        model = problem.model()
        for loss, rate in (("mse", 0.1), ("mae", 0.1), ("mse", 0.0)):
            before = model.get_weights()
            model.compile(ks.CrossShard(keras.optimizers.SGD(rate)), loss)
            plain = problem.model()
            plain.set_weights(before)
            plain.compile(keras.optimizers.SGD(rate), loss)
            expected = plain.evaluate(x, y, batch_size=len(x), verbose=0)
            np.testing.assert_allclose(model.evaluate(x, y, batch_size=len(x), verbose=0), expected, rtol=1e-5)
            found = model.fit(x, y, batch_size=len(x), verbose=0).history["loss"]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            assert any((a != b).any() for a, b in zip(before, model.get_weights())) == bool(rate)
