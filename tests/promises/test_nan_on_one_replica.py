"""`on_nonfinite`: NaN or infinity on any one replica, accumulating or not, and who it was."""

import functools
import itertools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import nonfinite
from support import checks, launch, problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.update import nonfinite as finite

in_one_process = pytest.mark.backends("tensorflow", "jax")
NUM_REPLICAS = nonfinite.NUM_REPLICAS


class Steps:
    """An optimizer and two weights on four replicas, one compiled step for all checks."""

    def __init__(self, way):
        wrap, arguments = nonfinite.WAYS[way]
        self.weights = nonfinite.weights
        arguments = {"axis_name": "replicas", **arguments}
        if BACKEND == "jax":
            self._variables = self.weights()
            self.optimizer = ks.CrossShard(wrap(problem.sgd_momentum()), **arguments)
            self.optimizer.build(self._variables)
            self._state = [*self._variables, *self.optimizer.variables]
            self._start = [np.asarray(v.value) for v in self._state]
        else:
            import tensorflow as tf

            self._strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(NUM_REPLICAS)])
            with self._strategy.scope():
                self._variables = self.weights()
                arguments["gradients"] = "local"
                self.optimizer = ks.CrossShard(wrap(problem.sgd_momentum()), **arguments)
                self.optimizer.build(self._variables)
            self._state = [*self._variables, *self.optimizer.variables]
            self._start = [np.asarray(keras.ops.convert_to_numpy(v)) for v in self._state]
            self._step = tf.function(
                lambda *grads: self._strategy.run(self._apply, args=grads), autograph=False, reduce_retracing=True
            )

    def _apply(self, *grads):
        scale = keras.ops.convert_to_tensor(self.optimizer.loss_scale)
        self.optimizer.apply([grad * scale for grad in grads], self._variables)

    @functools.cached_property
    def _mapped(self):
        import jax

        def step(state, grads):
            num = len(self._variables)
            with keras.StatelessScope(state_mapping=list(zip(self._state, state))):
                scale = keras.ops.convert_to_tensor(self.optimizer.loss_scale)
            grads = [grad * scale for grad in grads]
            weights, slots = self.optimizer.stateless_apply(state[num:], grads, state[:num])
            return [*weights, *slots]

        return jax.pmap(step, axis_name="replicas")

    def __call__(self, gradients):
        """Runs from the start; `gradients` are `[step][variable][replica]`. Returns each replica's weights."""
        if BACKEND == "jax":
            state = [np.stack([value] * NUM_REPLICAS) for value in self._start]
            for grads in gradients:
                state = self._mapped(state, grads)
            for variable, value in zip(self._state, state):
                if not self.optimizer.group_assignment and variable.shape == ():  # counters and scales
                    np.testing.assert_array_equal(value, np.asarray(value)[:1].repeat(NUM_REPLICAS))
                variable.assign(value[0])
            return [[np.asarray(value[r]) for value in state[:2]] for r in range(NUM_REPLICAS)]
        import tensorflow as tf

        for variable, value in zip(self._state, self._start):
            variable.assign(value)
        for grads in gradients:
            self._step(
                *[
                    self._strategy.experimental_distribute_values_from_function(
                        lambda context, grad=grad: tf.constant(grad[context.replica_id_in_sync_group])
                    )
                    for grad in grads
                ]
            )
        return [[v.value.values[r].numpy() for v in self._variables] for r in range(NUM_REPLICAS)]


@functools.cache
def steps(way):
    return Steps(way)


@in_one_process
@pytest.mark.parametrize("way", some(nonfinite.WAYS, ["clipped", "loss scaling alone, accumulating"]))
def test_on_any_replica_the_update_is_left_out_on_all(way):
    run = steps(way)
    for bad, replica in itertools.product((np.nan, np.inf), range(NUM_REPLICAS)):
        weights = run(nonfinite.gradients(bad, replica))
        for r, mine in enumerate(weights):
            nonfinite.check(way, run.optimizer, mine, replica, r)


@in_one_process
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_check_that_is_left_out_turns_the_check_red(monkeypatch):
    monkeypatch.setattr(finite, "first_not_finite", lambda *_: keras.ops.zeros((), "int32"))
    run = Steps("accumulating")
    with pytest.raises(AssertionError):
        nonfinite.check("accumulating", run.optimizer, run(nonfinite.gradients(np.nan, 1))[0], 1)


@in_one_process
@pytest.mark.exhaustive("jax", "tensorflow")
def test_flags_of_another_replica_turn_the_check_red(monkeypatch):
    real = finite.flags
    monkeypatch.setattr(finite, "flags", lambda position, replica, *rest: real(position, 0, *rest))
    run = Steps("each step")
    with pytest.raises(AssertionError):
        nonfinite.check("each step", run.optimizer, run(nonfinite.gradients(np.inf, 1))[0], 1)


@in_one_process
@pytest.mark.exhaustive("jax", "tensorflow")
def test_what_a_transform_has_put_right_counts(monkeypatch):
    def finite_ones(grads, variables):
        return [keras.ops.where(keras.ops.isfinite(grad), grad, keras.ops.zeros_like(grad)) for grad in grads]

    arguments = {"on_nonfinite": "skip", "replica_transform": finite_ones}
    monkeypatch.setitem(nonfinite.WAYS, "put right", (nonfinite.WAYS["each step"][0], arguments))
    run = Steps("put right")
    assert np.all(np.isfinite(np.concatenate([w.reshape(-1) for w in run(nonfinite.gradients(np.nan, 1))[0]])))
    assert nonfinite.number(run.optimizer.iterations) == nonfinite.NUM_STEPS
    assert nonfinite.number(run.optimizer.skipped_steps) == 0 and run.optimizer.last_nonfinite is None


# -- under fit ---------------------------------------------------------------------------------------------------


def fit(num_replicas, *callbacks, prepared=False, num_steps=None, bad_row=9, **compile_arguments):
    """A model whose third batch of six has a NaN in one row; with the error that ended training, or None."""
    x, y = problem.data(6)
    x[2 * problem.BATCH_SIZE + bad_row, 1] = np.nan
    error = None
    with ks.data_parallel(num_replicas, prepare=False) as replicas:
        model = problem.model()
        optimizer = ks.CrossShard("sgd", gradient_accumulation_steps=num_steps, on_nonfinite="raise")
        model.compile(optimizer, "mse", **compile_arguments)
        if prepared:
            ks.prepare(model)
        try:
            arguments = {"batch_size": problem.BATCH_SIZE, "shuffle": False, "verbose": 0}
            model.fit(x, y, callbacks=list(callbacks), **arguments)
        except Exception as raised:
            error = raised
    replicas.close()
    return model, error


HIDDEN = "mlp/hidden/kernel"


RAISING = list(itertools.product([1, 2] if BACKEND != "torch" else [1], [None, 2]))


@pytest.mark.parametrize(("num_replicas", "num_steps"), some(RAISING, [(1, None), (2, 2)], "jax", "tensorflow"))
def test_raise_ends_training_and_leaves_the_weights(num_replicas, num_steps):
    stop = ks.callbacks.StopOnNonFinite()
    model, error = fit(num_replicas, stop, prepared=BACKEND == "jax", num_steps=num_steps)
    replica = 9 // (problem.BATCH_SIZE // num_replicas)
    expected = "InvalidArgumentError" if BACKEND == "tensorflow" else "FloatingPointError"
    assert type(error).__name__ == expected, error
    assert "on_nonfinite" in str(error) and HIDDEN in str(error), error
    if BACKEND == "jax" and num_steps is None and num_replicas > 1:
        replica = None  # XLA has reduced the gradients before anyone sees them
        assert "on an unidentified replica," in str(error)
    elif BACKEND != "tensorflow":
        assert f"on replica {replica}," in str(error)
    assert model.optimizer.last_nonfinite == (replica, HIDDEN)
    assert int(np.asarray(keras.ops.convert_to_numpy(model.optimizer.iterations))) == (2 if num_steps is None else 1)
    reference = problem.model()
    reference.compile("sgd", "mse")
    x, y = (a[: 2 * problem.BATCH_SIZE] for a in problem.data(6))
    reference.fit(x, y, batch_size=(num_steps or 1) * problem.BATCH_SIZE, shuffle=False, verbose=0)
    for weight, other in zip(model.get_weights(), reference.get_weights()):
        np.testing.assert_allclose(weight, other, rtol=0, atol=2e-7)  # of weights up to 1


@pytest.mark.parametrize("num_steps", some([None, 2], [2], "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_training_may_go_on_after_the_error(num_steps):
    model, error = fit(1, ks.callbacks.StopOnNonFinite(), num_steps=num_steps)
    assert error is not None
    again = {"batch_size": problem.BATCH_SIZE, "verbose": 0}
    model.fit(*problem.data(2), callbacks=[ks.callbacks.StopOnNonFinite()], **again)
    bad = np.full_like(problem.data(2)[0], np.nan)
    with pytest.raises(Exception, match="NaN or infinity"):
        model.fit(bad, problem.data(2)[1], callbacks=[ks.callbacks.StopOnNonFinite()], **again)


@pytest.mark.backends("jax")
def test_without_the_callback_jax_raises_at_the_end_of_fit():
    model, error = fit(2)
    assert isinstance(error, FloatingPointError)
    assert "an unidentified replica" in str(error)  # XLA has reduced the gradients
    assert model.optimizer.last_nonfinite == (None, HIDDEN)
    assert int(model.optimizer.iterations) == 5


@pytest.mark.backends("tensorflow")
def test_eager_steps_raise_at_once():
    _, error = fit(2, run_eagerly=True)
    assert isinstance(error, FloatingPointError) and "on replica 1," in str(error)


# -- ranks -------------------------------------------------------------------------------------------------------


RANKS = launch.SCRIPTS / "rank_nonfinite.py"


# What test_skipped_updates_leave_nothing.py shows of one process by default.
OTHERS = ["a_skipped_update_leaves_no_statistics_or_seeds_behind"]


@pytest.fixture(scope="module")
def on_ranks(request, tmp_path_factory):
    return checks.Runs(request, RANKS, tmp_path_factory.mktemp("ranks"), NUM_REPLICAS)


@pytest.mark.backends("torch")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", some(checks.names_in(RANKS), lambda name: name not in OTHERS))
def test_on_ranks(on_ranks, name):
    on_ranks.verify(name)
