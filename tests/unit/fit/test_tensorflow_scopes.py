"""TensorFlow: models, optimizers and files on the wrong side of a scope, and what Keras' trainer cannot do inside."""

import contextlib
import functools
import tempfile

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.models import is_prepared

pytestmark = pytest.mark.backends("tensorflow")

OUTSIDE = r"was made outside the strategy of the optimizer, which has 2 replicas\. Build or load the model"


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


def train_apart(inner):
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return ks.CrossShard(inner, sync_every=2, outer_optimizer=outer, sync_warmup=0)


def scales_loss(inner):
    return ks.CrossShard(ks.LossScaling(inner))


def in_its_scope(model):
    return model.distribute_strategy.scope()


def outside(model):
    return contextlib.nullcontext()


def in_another_block(model):
    return ks.data_parallel(2)


def load_state(model):
    fit(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/then.weights.h5")
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
        model.load_weights(f"{folder}/then.weights.h5")
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 3


@functools.cache
def fine_tuned(first, around, where, before=lambda model: None):
    """Weights and logs of Keras' recipe: train, freeze layers, compile again there, train again."""
    x, y = (rows[:-3] for rows in problem.data(num_steps=3))  # the last batch does not divide
    with ks.data_parallel(2):
        model = problem.model()
        model.compile(first(problem.sgd_momentum()), "mse")
    fit(model)
    model.layers[0].trainable = False
    frozen = model.layers[0].get_weights()
    with where(model):
        metrics = [keras.metrics.MeanAbsoluteError(), keras.metrics.R2Score()]
        model.compile(around(problem.sgd_momentum()), "mse", metrics=metrics)
    before(model)
    history = model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0).history
    np.testing.assert_equal(model.layers[0].get_weights(), frozen)
    return model.get_weights(), history


ROWS = [
    *[(ks.CrossShard, ks.CrossShard, where) for where in (outside, in_another_block)],
    *[(ks.CrossShard, around, outside) for around in (train_apart, keras.optimizers.get)],
    (train_apart, scales_loss, outside),
]


@pytest.mark.parametrize(("first", "around", "where"), some(ROWS, ROWS[1:2]))
def test_compiling_again_elsewhere_is_compiling_in_the_scope(first, around, where):
    np.testing.assert_equal(fine_tuned(first, around, where), fine_tuned(first, around, in_its_scope))


@pytest.mark.exhaustive
def test_state_is_loaded_into_an_optimizer_that_was_made_outside_the_scope():
    (loaded, _), (kept, _) = (
        fine_tuned(ks.CrossShard, ks.CrossShard, where, before)
        for where, before in ((outside, load_state), (in_its_scope, fit))
    )
    np.testing.assert_equal(loaded, kept)


def test_fit_prepares_a_model_that_was_made_in_the_block_and_compiled_outside():
    with ks.data_parallel(2):
        model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    fit(model)
    assert is_prepared(model)


def test_a_replica_cannot_bring_an_optimizer_into_its_strategy():
    with ks.data_parallel(2, prepare=False):
        model = problem.model()
    optimizer, variables = ks.CrossShard(problem.sgd_momentum(), gradients="local"), model.trainable_variables
    apply = lambda: optimizer.apply([keras.ops.ones_like(v) for v in variables], variables)  # noqa: E731
    strategy = model.distribute_strategy
    with pytest.raises(
        ValueError, match=r"first used inside `strategy\.run`.* made outside this scope, for 2 replicas"
    ):
        strategy.run(apply)
    with strategy.scope():
        optimizer.build(variables)
    strategy.run(apply)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 1


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
    with pytest.warns(
        UserWarning, match=r"load the model inside the scope.* after a scope of 2 replicas\. Load the model"
    ) as caught:
        fit(loaded)
        fit(loaded)
    assert len(caught) == 1
    for num_replicas in (2, 1):  # the two fixes
        with ks.data_parallel(num_replicas):
            fit(keras.saving.load_model(tmp_path / "model.keras"))


@pytest.mark.parametrize("prepare", some([True, False], [True]))
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
