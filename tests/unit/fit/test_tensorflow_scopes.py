"""TensorFlow: models, optimizers and files on the wrong side of a scope, and what Keras' trainer cannot do inside."""

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow")

OUTSIDE = r"was made outside the strategy of the optimizer, which has 2 replicas\. Build the model inside .*load"


@pytest.fixture(autouse=True)
def no_scope_afterwards():
    yield
    with ks.data_parallel(1):
        pass


def fit(model):
    model.fit(*problem.data(num_steps=3), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("momentum", "inside"), some([(m, i) for m in (0.0, 0.9) for i in (True, False)], [(0.9, True)])
)
def test_a_model_made_before_the_scope_is_refused(inside, momentum):
    model, inner = problem.model(), keras.optimizers.SGD(0.1, momentum)
    with ks.data_parallel(2, prepare=False):
        model.compile(ks.CrossShard(inner if not inside else keras.optimizers.SGD(0.1, momentum)), "mse")
        if inside:
            with pytest.raises(ValueError, match=OUTSIDE):
                fit(model)
    with pytest.raises(ValueError, match=OUTSIDE):
        fit(model)


@pytest.mark.parametrize("around", some([keras.optimizers.get, ks.CrossShard], [ks.CrossShard]))
def test_an_optimizer_made_after_the_scope_of_a_prepared_model_is_refused_with_the_fix(around):
    with ks.data_parallel(2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", jit_compile=False)
    ks.prepare(model)
    fit(model)
    start = model.get_weights()
    model.compile(around(problem.sgd_momentum()), "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"made outside it, for a model on 2 replicas\. .*distribute_strategy"):
        fit(model)
    with model.distribute_strategy.scope():  # as it says
        model.compile(around(problem.sgd_momentum()), "mse", jit_compile=False)
    weights = fit(model)
    alone = problem.model()
    alone.set_weights(start)
    alone.compile(problem.sgd_momentum(), "mse", jit_compile=False)
    assert problem.relative_difference(weights, fit(alone)) <= problem.TOLERANCE


def test_a_scope_that_was_closed_is_over():
    with ks.data_parallel(2) as replicas:
        problem.model()
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    with pytest.raises(ValueError, match=OUTSIDE):
        ks.prepare(model)
    replicas.close()
    fit(ks.prepare(model))


def test_a_model_loaded_after_the_scope_is_not_prepared(tmp_path):
    with ks.data_parallel(2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=OUTSIDE):
        ks.prepare(keras.saving.load_model(tmp_path / "model.keras"))
    with ks.data_parallel(2):
        loaded = ks.prepare(keras.saving.load_model(tmp_path / "model.keras"))
    fit(loaded)
    assert len(loaded.trainable_variables[0].value.values) == 2
    with ks.data_parallel(1):  # who wants one device says so
        fit(ks.prepare(keras.saving.load_model(tmp_path / "model.keras")))


def test_training_a_model_loaded_after_the_scope_is_warned_of(tmp_path):
    with ks.data_parallel(2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.predict(problem.data(1)[0], verbose=0)  # warnings are errors here
    with pytest.warns(UserWarning, match=r"loaded inside the scope.* after a scope of 2 replicas\. Load it") as caught:
        fit(loaded)
        fit(loaded)
    assert len(caught) == 1
    for num_replicas in (2, 1):  # the two fixes
        with ks.data_parallel(num_replicas):
            fit(keras.saving.load_model(tmp_path / "model.keras"))


@pytest.mark.parametrize("prepare", [True, False])
def test_the_whole_step_is_not_compiled_by_xla(prepare):
    with ks.data_parallel(2, prepare=False):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", jit_compile=True)
    if prepare:
        ks.prepare(model)
    with pytest.raises(ValueError, match=r"Received: jit_compile=True, .* set `model\.jit_compile = False`"):
        fit(model)
    model.jit_compile = False
    model.train_function = None
    fit(model)


def test_several_steps_per_execution_need_prepare_and_are_those_of_one():
    def trained(**arguments):
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", **arguments)
        return model

    with ks.data_parallel(2, prepare=False):
        model = problem.model()
        trained(steps_per_execution=2)
    with pytest.raises(ValueError, match=r"Received: steps_per_execution=2, .*Call `keras_shardopt\.prepare"):
        fit(model)

    calls = []

    class Calls(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls.append(batch)

        def on_test_batch_end(self, batch, logs=None):
            calls.append(("test", batch))

    with ks.data_parallel(2):
        model = problem.model()
        trained(steps_per_execution=2)
    ks.prepare(model)
    x, y = (rows[:-3] for rows in problem.data(num_steps=3))  # 16 + 16 + 13 rows: the last execution is a short one
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0, callbacks=[Calls()])
    loss = model.evaluate(x, y, batch_size=problem.BATCH_SIZE, verbose=0, callbacks=[Calls()])
    assert len(calls) == 4 and calls[0] == 1 and calls[2] == ("test", 1)
    alone = problem.model()
    alone.compile(problem.sgd_momentum(), "mse", jit_compile=False)
    alone.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(model.get_weights(), alone.get_weights()) <= problem.TOLERANCE
    np.testing.assert_allclose(loss, np.mean((alone.predict(x, verbose=0) - y) ** 2), rtol=1e-5)
