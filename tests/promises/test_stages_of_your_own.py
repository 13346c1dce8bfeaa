"""Stages that users write: they see what they should, in their order, and are saved with the optimizer."""

import keras
import numpy as np
import pytest
from keras import ops
from support import problem
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.communicator import GradientState

LOCAL, PRESCALED = GradientState.LOCAL, GradientState.LOCAL_PRESCALED


@keras.saving.register_keras_serializable("test_stages")
class Noting(ks.Stage):
    """Notes what it is shown, and multiplies."""

    def __init__(self, factor=1.0):
        self.factor = factor
        self.seen = []

    def build(self, variables, add_variable):
        self.count = add_variable(shape=(), initializer="zeros", name="count")

    def collect(self, step, proceed):
        self.seen.append("collect")
        proceed(step)

    def local(self, step, comm):
        self.seen.append("local")
        (largest,) = comm.all_reduce([ops.cast(comm.replica_id, "float32")], "max")
        grads = [grad * self.factor for grad in step.grads]
        return step.replace(grads=grads, notes={**step.notes, "largest": largest})

    def commit(self, step, proceed):
        self.seen.append("commit")
        self.count.assign(self.count + step.notes["largest"])
        proceed(step)

    def reset(self):
        self.seen.append("reset")

    def get_config(self):
        return {"factor": self.factor}


def trained(world, make, grads):
    """Each replica's optimizer and weight after one update for each row of `grads`, an array `[steps, replicas, 2]`."""

    def of_replica(replicas):
        optimizer, weight = make(), keras.Variable(np.zeros(2, "float32"), name="w")
        for row in grads:
            optimizer.apply([ops.convert_to_tensor(row[replicas.replica_id])], [weight])
        return optimizer, ops.convert_to_numpy(weight)

    return world.run(of_replica)


def rows(num_steps, num_replicas):
    return np.random.default_rng(2).normal(size=(num_steps, num_replicas, 2)).astype("float32")


@pytest.mark.parametrize("state", [LOCAL, PRESCALED])
def test_a_stage_sees_local_gradients_and_global_ones_in_their_order(state, monkeypatch):
    world, grads = FakeWorld(4, state).hold(monkeypatch), rows(3, 4)
    divided = grads / 4 if state is PRESCALED else grads
    results = trained(world, lambda: ks.CrossShard(keras.optimizers.SGD(1.0), stages=[Noting(2.0)]), divided)
    for optimizer, weight in results:
        np.testing.assert_allclose(weight, -2 * grads.mean(axis=1).sum(axis=0), rtol=1e-5)
        (stage,) = optimizer.stages
        assert stage.seen == ["collect", "local", "commit"] * 3
        assert float(stage.count) == 3 * 3.0


def test_stages_come_in_the_order_in_which_they_are_given(monkeypatch):
    log = []

    class Named(ks.Stage):
        needs_local_gradients = False

        def __init__(self, name):
            self.name = name

        def collect(self, step, proceed):
            log.append(f"collect {self.name}")
            proceed(step)
            log.append(f"collected {self.name}")

        def local(self, step, comm):
            log.append(f"local {self.name}")
            return step

        def commit(self, step, proceed):
            log.append(f"commit {self.name}")
            proceed(step)

    optimizer, weight = ks.CrossShard("sgd", stages=[Named("a"), Named("b")]), keras.Variable([1.0, 2.0])
    optimizer.apply([ops.ones(2)], [weight])
    before = ["collect a", "collect b", "local a", "local b", "commit a", "commit b"]
    assert log == [*before, "collected b", "collected a"]


def test_with_micro_steps_it_sees_the_window(monkeypatch):
    world, grads = FakeWorld(2).hold(monkeypatch), rows(4, 2)
    make = lambda: ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2, stages=[Noting()])  # noqa: E731
    for optimizer, weight in trained(world, make, grads):
        np.testing.assert_allclose(weight, -grads.mean(axis=1).sum(axis=0) / 2, rtol=1e-5)
        assert optimizer.stages[0].seen == ["collect", "local", "commit"] * 2


def test_of_a_skipped_update_it_sees_no_commit(monkeypatch):
    world, grads = FakeWorld(2).hold(monkeypatch), rows(3, 2)
    grads[1, 1, 0] = np.nan
    make = lambda: ks.CrossShard(keras.optimizers.SGD(1.0), on_nonfinite="skip", stages=[Noting()])  # noqa: E731
    for optimizer, weight in trained(world, make, grads):
        np.testing.assert_allclose(weight, -grads[[0, 2]].mean(axis=1).sum(axis=0), rtol=1e-5)
        assert float(optimizer.stages[0].count) == 2 * 1.0


def test_a_stage_needs_local_gradients_where_it_overrides_local(monkeypatch):
    world = FakeWorld(2, GradientState.GLOBAL).hold(monkeypatch)
    with pytest.raises(ValueError, match="`stages` needs the gradients of each replica, before they are reduced"):
        trained(world, lambda: ks.CrossShard("sgd", stages=[Noting()]), rows(1, 2))


@pytest.mark.neutral
def test_stages_are_saved_with_the_optimizer(tmp_path):
    model = problem.model()
    model.compile(ks.CrossShard("sgd", stages=[Noting(3.0), ks.GradientNoise(0.5)]), "mse")
    model.save(tmp_path / "model.keras")
    first, second = keras.saving.load_model(tmp_path / "model.keras").optimizer.stages
    assert (first.factor, second.momentum) == (3.0, 0.5)


@pytest.mark.neutral
@pytest.mark.parametrize("stages", [Noting(), [Noting], "noting", [lambda step: step]])
def test_what_is_no_stage_is_refused(stages):
    with pytest.raises(
        TypeError, match=r"`stages` must be a list of `keras_shardopt.Stage` objects. Received: stages="
    ):
        ks.CrossShard("sgd", stages=stages)


@pytest.mark.parametrize("state", [LOCAL, PRESCALED])
def test_the_noise_of_gradients_is_that_of_the_formulas(state, monkeypatch):
    world, grads = FakeWorld(4, state).hold(monkeypatch), rows(5, 4) + 3
    divided = grads / 4 if state is PRESCALED else grads
    signal = noise = 0.0
    for row in grads:
        of_mean, mean = np.sum(row.mean(axis=0) ** 2), np.mean(np.sum(row**2, axis=1))
        signal = 0.9 * signal + 0.1 * (4 * of_mean - mean) / 3
        noise = 0.9 * noise + 0.1 * 4 * (mean - of_mean) / 3
    results = trained(world, lambda: ks.CrossShard("sgd", stages=[ks.GradientNoise(0.9)]), divided)
    for optimizer, _ in results:
        np.testing.assert_allclose(optimizer.stages[0].noise_scale, noise / signal, rtol=1e-4)


def test_one_replica_has_nothing_to_compare():
    noise = ks.GradientNoise()
    optimizer, weight = ks.CrossShard("sgd", stages=[noise]), keras.Variable([1.0, 2.0])
    optimizer.apply([ops.ones(2)], [weight])
    assert np.isnan(noise.noise_scale)


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("sgd", {"reduction": "sum"}),
        ("sgd", {"shard_state": True}),
        ("sgd", {"group_assignment": [[0], [1]]}),
        (lambda: ks.LossScaling("sgd", "Backoff"), {}),
    ],
)
def test_noise_is_refused_where_its_formulas_do_not_hold(inner, arguments):
    with pytest.raises(ValueError, match="`GradientNoise` needs the mean of whole gradients over all replicas"):
        ks.CrossShard(inner() if callable(inner) else inner, stages=[ks.GradientNoise()], **arguments)


@pytest.mark.neutral
def test_a_stage_belongs_to_one_optimizer_once():
    stage = Noting()
    with pytest.raises(ValueError, match="`stages` must hold each stage once"):
        ks.CrossShard("sgd", stages=[stage, stage])
    weight = keras.Variable([1.0, 2.0])
    first, second = (ks.CrossShard("sgd", stages=[stage]) for _ in range(2))
    first.build([weight])
    with pytest.raises(ValueError, match="Each optimizer must have stages of its own. Received: Noting"):
        second.build([weight])


@pytest.mark.neutral
def test_a_stage_with_arguments_says_what_files_hold():
    class Forgetful(ks.Stage):
        def __init__(self, strength):
            self.strength = strength

    with pytest.raises(NotImplementedError, match="`Forgetful` must override `get_config`"):
        ks.CrossShard("sgd", stages=[Forgetful(2.0)]).get_config()
    assert "stages=[Forgetful(...)]" in repr(ks.CrossShard("sgd", stages=[Forgetful(2.0)]))
    assert "stages=[GradientNoise(momentum=0.95)]" in repr(ks.CrossShard("sgd", stages=[ks.GradientNoise()]))


class Counts(ks.Stage):
    def build(self, variables, add_variable):
        self.count = add_variable(shape=(), initializer="zeros", name="count")

    def local(self, step, comm):
        self.count.assign(self.count + 1)
        return step


@pytest.mark.backends("jax")
def test_local_that_assigns_is_refused_where_the_value_would_be_lost():
    x, y = problem.data()
    with ks.data_parallel(num_replicas=2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), stages=[Counts()]), "mse")
        with pytest.raises(ValueError, match="`local` of a stage must assign no variables.*count.*assign in `commit`"):
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    with ks.data_parallel(num_replicas=2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), stages=[Noting()]), "mse")
        model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    assert int(model.optimizer.stages[0].count) == problem.NUM_STEPS  # the largest of the ids 0 and 1, in each step
