"""Stages that users write: they see what they should, in their order, and are saved with the optimizer."""

import copy
import threading

import keras
import numpy as np
import pytest
from keras import ops
from support import problem
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.communicator import GradientState, SingleReplica
from keras_shardopt.update.overlapped import Overlapped
from keras_shardopt.update.step import Step

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
@pytest.mark.parametrize("arguments", [{"reduction": "sum"}, {"shard_state": True}, {"group_assignment": [[0], [1]]}])
def test_noise_is_refused_where_its_formulas_do_not_hold(arguments):
    with pytest.raises(ValueError, match="`GradientNoise` needs the mean of whole gradients over all replicas"):
        ks.CrossShard("sgd", stages=[ks.GradientNoise()], **arguments)


@pytest.mark.neutral
def test_a_stage_belongs_to_one_optimizer_once():
    stage = Noting()
    with pytest.raises(ValueError, match="`stages` must contain each stage once"):
        ks.CrossShard("sgd", stages=[stage, stage])
    weight = keras.Variable([1.0, 2.0])
    first, second = (ks.CrossShard("sgd", stages=[stage]) for _ in range(2))
    first.build([weight])
    with pytest.raises(ValueError, match="Each optimizer must have separate stages. Received: Noting"):
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


@pytest.mark.parametrize("shares", [(1.5, 0.5), (1.0, 0.0)])
def test_updates_with_unequal_rows_do_not_count_as_noise(shares, monkeypatch):
    world, grads = FakeWorld(2).hold(monkeypatch), rows(3, 2) + 3
    grads[1, 1] = np.nan if shares[1] == 0 else 100.0

    def of_replica(replicas):
        optimizer, weight = ks.CrossShard("sgd", stages=[ks.GradientNoise(0.9)]), keras.Variable([0.0, 0.0])
        for i, row in enumerate(grads):
            share = shares[replicas.replica_id] if i == 1 else 1.0
            monkeypatch.setattr("keras_shardopt.optimizers.cross_shard.row_share", lambda: shared.value)
            shared.value = share
            optimizer.apply([ops.convert_to_tensor(row[replicas.replica_id])], [weight])
        return optimizer.stages[0].noise_scale

    shared = threading.local()
    uneven = world.run(of_replica)
    grads, shares = np.delete(grads, 1, axis=0), (1.0, 1.0)
    world = FakeWorld(2).hold(monkeypatch)
    assert uneven == world.run(of_replica) and np.isfinite(uneven[0])


class Counts(ks.Stage):
    def build(self, variables, add_variable):
        self.count = add_variable(shape=(), initializer="zeros", name="count")

    def local(self, step, comm):
        self.count.assign(self.count + 1)
        return step


def test_local_that_assigns_is_refused_also_where_each_replica_has_a_value_of_its_own(monkeypatch):
    world = FakeWorld(2).hold(monkeypatch)
    with pytest.raises(ValueError, match="`Counts.local` must not assign variables.*count.*`step.notes`.*in `commit`"):
        trained(world, lambda: ks.CrossShard("sgd", stages=[Counts()]), rows(1, 2))


class Hands(ks.Stage):
    """Hands on what a function makes of the step, in one hook."""

    def __init__(self, hook, change):
        self._hook, self._change = hook, change

    def collect(self, step, proceed):
        proceed(self._change(step) if self._hook == "collect" else step)

    def local(self, step, comm):
        return self._change(step) if self._hook == "local" else step

    def commit(self, step, proceed):
        proceed(self._change(step) if self._hook == "commit" else step)


@pytest.mark.parametrize("hook", ["collect", "local", "commit"])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda step: None, TypeError, "a `Step`. Received: None"),
        (lambda step: step.grads, TypeError, "a `Step`. Received: a value of type list"),
        (lambda step: step.replace(grads=step.grads[:1]), ValueError, "for each of 2 variables. Received: 1"),
        (lambda step: step.replace(grads=None), TypeError, "a list of `grads`. Received: None"),
        (lambda step: step.replace(grads=(g for g in step.grads)), TypeError, "Received: a value of type generator"),
        (
            lambda step: step.replace(grads=[g[0] for g in step.grads]),
            ValueError,
            r"unchanged shapes. Received: shape \(\) for `.*`, instead of \(2,\)",
        ),
        (lambda step: step.replace(grads=[0.5, 0.5]), TypeError, "tensors.*`keras.ops.convert_to_tensor`"),
        (lambda step: step.replace(notes=[step.grads[0]]), TypeError, "a dict of `notes`"),
    ],
)
def test_what_no_replica_can_go_on_with_is_refused(hook, change, error, words):
    optimizer = ks.CrossShard("sgd", stages=[Hands(hook, change)])
    weights = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    with pytest.raises(error, match=rf"`Hands.{hook}` must (return|proceed with) .*{words}"):
        optimizer.apply([ops.ones(2), ops.ones(2)], weights)
    assert int(optimizer.iterations) == 0


def test_replicas_send_gradients_of_all_variables_in_their_dtypes():
    def fewer(step):
        return step.replace(grads=step.grads[:1], variables=step.variables[:1])

    weights = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    with pytest.raises(ValueError, match="`Hands.local` must return unchanged `variables`"):
        ks.CrossShard("sgd", stages=[Hands("local", fewer)]).apply([ops.ones(2), ops.ones(2)], weights)
    ks.CrossShard("sgd", stages=[Hands("commit", fewer)]).apply([ops.ones(2), ops.ones(2)], weights)
    wide = Hands("local", lambda step: step.replace(grads=[ops.cast(g, "float32") for g in step.grads]))
    optimizer, weight = ks.CrossShard("sgd", stages=[wide]), keras.Variable([1.0, 2.0], dtype="bfloat16")
    optimizer.build([weight])
    sent = optimizer.pipeline.stages[0].local(Step([ops.ones(2, "bfloat16")], [weight]), SingleReplica())
    assert keras.backend.standardize_dtype(sent.grads[0].dtype) == "bfloat16"


class Signs(ks.Stage):
    """Keeps the signs of a replica's own gradients, and of their mean the third root; and adds up what it sees."""

    def build(self, variables, add_variable):
        self.total = add_variable(shape=(2,), initializer="zeros", name="total")

    def local(self, step, comm):
        return step.replace(grads=[ops.sign(grad) for grad in step.grads])

    def commit(self, step, proceed):
        self.total.assign(self.total + step.grads[0])
        proceed(step.replace(grads=[ops.sign(grad) * ops.abs(grad) ** (1 / 3) for grad in step.grads]))


@pytest.mark.parametrize("state", [LOCAL, PRESCALED])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_stage_sees_gradients_of_the_mean_loss_however_they_arrive(state, scale, monkeypatch):
    world, grads = FakeWorld(4, state).hold(monkeypatch), rows(3, 4)
    arriving = scale * (grads / 4 if state is PRESCALED else grads)
    inner = lambda: ks.LossScaling(keras.optimizers.SGD(1.0), scale) if scale > 1 else keras.optimizers.SGD(1.0)  # noqa: E731
    means = np.sign(grads).mean(axis=1)
    for optimizer, weight in trained(world, lambda: ks.CrossShard(inner(), stages=[Signs()]), arriving):
        np.testing.assert_allclose(weight, -np.cbrt(means).sum(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(optimizer.stages[0].total, means.sum(axis=0), rtol=1e-5, atol=1e-6)


def test_an_overflow_that_a_loss_scaling_skips_leaves_nothing_in_the_state_of_a_stage(monkeypatch):
    world, grads = FakeWorld(2).hold(monkeypatch), rows(3, 2)
    grads[1, 1, 0] = np.inf

    class Sums(Signs):
        local = ks.Stage.local

    inner = lambda: ks.LossScaling(keras.optimizers.SGD(1.0), ks.AutomaticLossScaler("Backoff", {"scale_max": 8.0}))  # noqa: E731
    finite = grads[[0, 2]].mean(axis=1)
    for optimizer, weight in trained(world, lambda: ks.CrossShard(inner(), stages=[Sums()]), grads * 8.0):
        assert int(ops.convert_to_numpy(optimizer.skipped_steps)) == 1
        assert np.isfinite(weight).all()
        # After the overflow the scale is 4, and what comes is that of 8.
        np.testing.assert_allclose(optimizer.stages[0].total, finite[0] + 2 * finite[1], rtol=1e-5)


class CountsUpdates(ks.Stage):
    takes_slices = True

    def __init__(self, repairs=False, proceeds=True):
        self.repairs, self.proceeds = repairs, proceeds

    def build(self, variables, add_variable):
        self.count = add_variable(shape=(), initializer="zeros", name="count")

    def commit(self, step, proceed):
        self.count.assign(self.count + 1)
        repaired = [grad if grad is None else ops.nan_to_num(grad, posinf=0.0) for grad in step.grads]
        if self.proceeds:
            proceed(step.replace(grads=repaired) if self.repairs else step)


@pytest.mark.parametrize("shard_state", [False, True])
@pytest.mark.parametrize("repairs", [False, True])
def test_a_stage_keeps_its_state_if_the_update_is_skipped_wherever_the_overflow_is(shard_state, repairs, monkeypatch):
    if shard_state and keras.config.backend() != "torch":
        pytest.skip("only ranks of PyTorch hold slices of a gradient")
    world, grads = FakeWorld(2).hold(monkeypatch), rows(3, 2)
    grads[1, 1, 0] = np.inf  # with slices, in the one of replica 0

    def make():
        inner = ks.LossScaling(keras.optimizers.SGD(1.0), ks.AutomaticLossScaler("Backoff", {"scale_max": 8.0}))
        return ks.CrossShard(inner, shard_state=shard_state, stages=[CountsUpdates(repairs)])

    for optimizer, _ in trained(world, make, grads * 8.0):
        updates, count = int(optimizer.iterations), int(ops.convert_to_numpy(optimizer.stages[0].count))
        assert (updates, count) == ((3, 3) if repairs else (2, 2))


def test_calls_that_an_inner_optimizer_only_adds_up_are_no_skipped_updates(monkeypatch):
    world = FakeWorld(2).hold(monkeypatch)
    inner = lambda: ks.LossScaling(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), "Backoff")  # noqa: E731
    make = lambda: ks.CrossShard(inner(), stages=[CountsUpdates()])  # noqa: E731
    for optimizer, _ in trained(world, make, rows(4, 2)):
        assert int(ops.convert_to_numpy(optimizer.stages[0].count)) == 4


def test_a_stage_that_leaves_an_update_out_itself_keeps_what_it_has_counted(monkeypatch):
    world = FakeWorld(2).hold(monkeypatch)
    inner = lambda: ks.LossScaling(keras.optimizers.SGD(1.0), ks.AutomaticLossScaler("Backoff"))  # noqa: E731
    make = lambda: ks.CrossShard(inner(), stages=[CountsUpdates(proceeds=False)])  # noqa: E731
    for optimizer, weight in trained(world, make, rows(3, 2)):
        assert int(ops.convert_to_numpy(optimizer.stages[0].count)) == 3 and not weight.any()


@pytest.mark.parametrize("holds", [lambda v: v, lambda v: [v], lambda v: {"count": v}])
def test_variables_that_the_optimizer_does_not_have_are_refused(holds):
    class Own(ks.Stage):
        def build(self, variables, add_variable):
            self.known = [*variables, add_variable(shape=(), initializer="zeros", name="count")]
            self.held = holds(keras.Variable(0.0, name="mine", trainable=False))

    rule = "`Own.build` must create its variables with the argument `add_variable`"
    with pytest.raises(ValueError, match=rf"{rule}.*\['mine'\]"):
        ks.CrossShard("sgd", stages=[Own()]).build([keras.Variable([1.0, 2.0])])


@pytest.mark.backends("jax")
def test_seeds_that_no_compiled_step_would_advance_are_refused():
    class Draws(ks.Stage):
        def build(self, variables, add_variable):
            self.seed = keras.random.SeedGenerator(1)

    with pytest.raises(ValueError, match="`Draws.build` must create its variables with the argument `add_variable`"):
        ks.CrossShard("sgd", stages=[Draws()]).build([keras.Variable([1.0, 2.0])])


@pytest.mark.backends("tensorflow")
def test_rows_that_a_gradient_lists_twice_are_one_row_of_the_noise(monkeypatch):
    import tensorflow as tf

    def scale(is_sparse):
        world = FakeWorld(2, PRESCALED).hold(monkeypatch)

        def of_replica(replicas):
            optimizer, weight = ks.CrossShard("sgd", stages=[ks.GradientNoise()]), keras.Variable(np.zeros((3, 2)))
            values = ops.convert_to_tensor([[1.0, 2.0], [3.0 + replicas.replica_id, 4.0]])
            grad = tf.IndexedSlices(values, tf.constant([1, 1]), tf.constant([3, 2]))
            optimizer.apply([grad if is_sparse else tf.convert_to_tensor(grad)], [weight])
            return optimizer.stages[0].noise_scale

        return world.run(of_replica)

    np.testing.assert_allclose(scale(True), scale(False), rtol=1e-6)
    assert np.isfinite(scale(False)).all()


@pytest.mark.neutral
@pytest.mark.parametrize(("hook", "waits"), [("collect", True), ("local", True), ("commit", False), ("reset", False)])
def test_only_stages_before_the_reduction_hold_it_up(hook, waits):
    stage = type("Own", (ks.Stage,), {hook: lambda self, *args: None})()
    optimizer = ks.CrossShard("sgd", stages=[stage])
    assert isinstance(optimizer.pipeline.reducer, Overlapped) != waits


@pytest.mark.backends("torch")
@pytest.mark.parametrize(
    "option, waits",
    [
        ({"group_assignment": [[0]]}, True),
        ({"replica_clipnorm": 1.0}, True),
        ({"replica_transform": lambda grads, variables: grads}, True),
        ({"extensions": [ks.VirtualReplicas(2)]}, True),
        ({"gradient_accumulation_steps": 2}, False),
        ({"on_nonfinite": "skip"}, False),
        ({"compression": "int8"}, False),
        ({"torch": ks.TorchSpeed(overlap=False)}, True),
    ],
)
def test_only_options_that_work_before_the_reduction_hold_it_up(option, waits):
    assert isinstance(ks.CrossShard("sgd", **option).pipeline.reducer, Overlapped) != waits


@pytest.mark.neutral
def test_a_stage_that_may_need_whole_gradients_is_refused_where_replicas_get_slices(monkeypatch):
    monkeypatch.setattr(placement, "state_sharding", "slices")
    with pytest.raises(
        ValueError, match="`commit` of a stage receives only this replica's slices.*`takes_slices = True`"
    ):
        ks.CrossShard("sgd", shard_state=True, stages=[Signs()])
    ks.CrossShard("sgd", shard_state=True, stages=[Counts(), type("Each", (Signs,), {"takes_slices": True})()])
    monkeypatch.setattr(placement, "state_sharding", "layout")
    ks.CrossShard("sgd", shard_state=True, stages=[Signs()])


@pytest.mark.neutral
@pytest.mark.parametrize("hook", ["collect", "commit"])
def test_a_hook_that_returns_the_step_in_place_of_proceeding_is_refused(hook):
    stage = type("Returns", (ks.Stage,), {hook: lambda self, step, proceed: step})()
    with pytest.raises(TypeError, match=rf"`Returns.{hook}` must return None. .*`proceed\(step\)`.*Received: Step"):
        ks.CrossShard("sgd", stages=[stage]).apply([ops.ones(2)], [keras.Variable([1.0, 2.0])])


@pytest.mark.neutral
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda optimizer: ks.CrossShard.from_config(optimizer.get_config()),
        lambda optimizer: ks.CrossShard("sgd", stages=[copy.copy(stage) for stage in optimizer.stages]),
        lambda optimizer: ks.CrossShard("sgd", stages=[copy.deepcopy(stage) for stage in optimizer.stages]),
    ],
)
def test_a_copy_has_stages_of_its_own(copied):
    first = ks.CrossShard("sgd", stages=[Noting(2.0)])
    first.apply([ops.ones(2)], [keras.Variable([1.0, 2.0])])
    second = copied(first)
    second.apply([ops.ones(2)], [keras.Variable([1.0, 2.0])])
    assert second.stages[0] is not first.stages[0] and second.stages[0].count is not first.stages[0].count
    assert second.stages[0].factor == 2.0 and float(second.stages[0].count) == 0.0


@pytest.mark.parametrize("how", ["weights", "model", "backup", "state"])
def test_stages_begin_anew_where_state_is_loaded(how, tmp_path):
    def trained():
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), stages=[Noting()]), "mse")
        backup = ks.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        model.fit(*problem.data(), batch_size=problem.BATCH_SIZE, verbose=0, callbacks=[backup] * (how == "backup"))
        return model

    first = trained()
    assert "reset" not in first.optimizer.stages[0].seen
    if how == "backup":
        assert trained().optimizer.stages[0].seen == ["reset"]
        return
    if how == "weights":
        first.save_weights(tmp_path / "of.weights.h5")
        first.load_weights(tmp_path / "of.weights.h5")
        found = first
    elif how == "model":
        first.save(tmp_path / "model.keras")
        found = keras.saving.load_model(tmp_path / "model.keras")
    else:
        store = {}
        first.optimizer.save_own_variables(store)
        first.optimizer.load_own_variables(store)
        found = first
    assert found.optimizer.stages[0].seen[-1] == "reset"


@pytest.mark.backends("jax")
def test_local_that_assigns_is_refused_where_the_value_would_be_lost():
    x, y = problem.data()
    with ks.data_parallel(num_replicas=2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), stages=[Counts()]), "mse")
        with pytest.raises(
            ValueError, match="`Counts.local` must not assign variables.*count.*assign the variable in `commit`"
        ):
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    with ks.data_parallel(num_replicas=2):
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), stages=[Noting()]), "mse")
        model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    assert int(model.optimizer.stages[0].count) == problem.NUM_STEPS  # the largest of the ids 0 and 1, in each step
