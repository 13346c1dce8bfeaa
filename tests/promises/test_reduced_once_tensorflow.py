"""TensorFlow: what `MirroredStrategy` does with CrossShard, counted and in custom training loops."""

import functools
import itertools

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow")
tf = pytest.importorskip("tensorflow", reason="about TensorFlow, which is not installed")


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def reductions(monkeypatch):
    """The number of tensors in each all-reduce that is traced or run."""
    from tensorflow.python.distribute import distribute_lib

    calls = []
    real = distribute_lib.StrategyExtendedV2.batch_reduce_to

    def counting(self, op, pairs, *args, **kwargs):
        calls.append(len(pairs))
        return real(self, op, pairs, *args, **kwargs)

    monkeypatch.setattr(distribute_lib.StrategyExtendedV2, "batch_reduce_to", counting)
    return calls


def embedding_model(constraint=None):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def word_data():
    return (np.arange(192).reshape(64, 3) * 7 % 10).astype("int32"), problem.data(num_steps=4)[1]


def fit(model, x, y, **compile_arguments):
    model.compile(**{"loss": "mse", **compile_arguments})
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def one_device():
    """The weights of a model that one device trains with the whole batches, four of them."""
    return fit(problem.model(), *problem.data(num_steps=4), optimizer=problem.sgd_momentum())


INNERS = {
    "sgd": problem.sgd_momentum,
    "adam clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(problem.sgd_momentum()),
    "nested": lambda: ks.CrossShard(problem.sgd_momentum()),
}


@pytest.mark.parametrize("inner", some(INNERS, ["nested"]))
@pytest.mark.parametrize("eagerly", some([True, False], [False]))
def test_exactly_one_all_reduce_per_update(strategy, reductions, inner, eagerly, monkeypatch):
    updates = []
    apply = ks.CrossShard.apply

    def counting(self, *args, **kwargs):
        if self is optimizer:
            updates.append(1)
        return apply(self, *args, **kwargs)

    monkeypatch.setattr(ks.CrossShard, "apply", counting)
    x, y = problem.data(num_steps=2)
    with strategy.scope():
        model = problem.model()
        optimizer = ks.CrossShard(INNERS[inner]())
    fit(model, x, y, optimizer=optimizer, run_eagerly=eagerly)
    # Both replicas apply, in each step that is run or traced, and reduce the four gradients once for it.
    assert len(updates) in ([4] if eagerly else [2, 4])
    assert reductions == [4] * (len(updates) // 2)
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize("eagerly", some([True, False], [False]))
@pytest.mark.exhaustive
def test_without_the_claim_the_inner_optimizer_would_reduce_again(strategy, reductions, monkeypatch, eagerly):
    """The count above can fail."""
    from keras_shardopt.backends.gradient_scope import GradientScope

    x, y = problem.data(num_steps=1)
    monkeypatch.setattr(GradientScope, "is_reduced", False)
    with strategy.scope():
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum())
    fit(model, x, y, optimizer=optimizer, run_eagerly=eagerly)
    assert reductions == [4, 4]


def test_the_inner_optimizer_still_reduces_when_it_is_used_alone(strategy):
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        model, inner = problem.model(), problem.sgd_momentum()
        ks.CrossShard(inner)
    weights = fit(model, x, y, optimizer=inner)
    assert problem.relative_difference(weights, one_device()) <= problem.TOLERANCE


@pytest.mark.parametrize("eagerly", some([True, False], [True]))
@pytest.mark.exhaustive
def test_run_eagerly_equals_one_device(strategy, eagerly):
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum())
    weights = fit(model, x, y, optimizer=optimizer, run_eagerly=eagerly)
    assert problem.relative_difference(weights, one_device()) <= problem.TOLERANCE


@pytest.mark.parametrize("clip", some([{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}], [{}]))
@pytest.mark.parametrize("name", some(["SGD", "Adam"], ["Adam"]))
def test_sparse_gradients_of_an_embedding(strategy, clip, name):
    def make():
        return getattr(keras.optimizers, name)(0.1, **clip)

    x, y = word_data()
    with strategy.scope():
        model, optimizer = embedding_model(), ks.CrossShard(make())
    start = model.get_weights()
    weights = fit(model, x, y, optimizer=optimizer)
    reference = fit(embedding_model(), x, y, optimizer=make())
    assert problem.relative_difference(weights, reference, start) <= problem.TOLERANCE


LOOPS = list(itertools.product([True, False], ["local", "auto", "prescaled"]))


@pytest.mark.parametrize(("compiled", "gradients"), some(LOOPS, [(True, "local"), (True, "auto")]))
def test_a_loop_of_ones_own(strategy, compiled, gradients):
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum(), gradients=gradients)
        optimizer.build(model.trainable_variables)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            if gradients != "local":
                loss = loss / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def step(x, y):
        return strategy.run(on_replica, args=(x, y))

    step = tf.function(step) if compiled else step
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(problem.BATCH_SIZE)
    for batch in strategy.experimental_distribute_dataset(data):
        step(*batch)
    assert problem.relative_difference(model.get_weights(), one_device()) <= problem.TOLERANCE
    for variable in model.weights:
        first, second = variable.value.values
        np.testing.assert_array_equal(first, second)


def test_a_loss_that_returns_a_scalar_arrives_local(strategy):
    def scalar(targets, outputs):
        return tf.reduce_mean(tf.square(targets - outputs))

    x, y = problem.data(num_steps=4)
    with strategy.scope():
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum(), gradients="local")
    weights = fit(model, x, y, optimizer=optimizer, loss=scalar)
    assert problem.relative_difference(weights, one_device()) <= problem.TOLERANCE


def test_the_branch_without_merge_call(strategy, monkeypatch):
    """As on TPU and under XLA on GPUs, where there is no cross-replica context."""
    monkeypatch.setattr(type(strategy.extended), "_use_merge_call", lambda self: False)
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        assert tf.__internal__.distribute.strategy_supports_no_merge_call()
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum())
    weights = fit(model, x, y, optimizer=optimizer)
    assert problem.relative_difference(weights, one_device()) <= problem.TOLERANCE


@pytest.mark.parametrize("bad_replica", some([0, 1], [1]))
def test_loss_scaling_inside_skips_when_any_replica_overflows(strategy, bad_replica):
    x, y = problem.data(num_steps=1)
    x[bad_replica * problem.BATCH_SIZE // 2, 0] = np.inf
    with strategy.scope():
        model = problem.model()
        inner = keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=4.0)
    weights = fit(model, x, y, optimizer=ks.CrossShard(inner))
    for a, b in zip(weights, problem.start_weights()):
        np.testing.assert_array_equal(a, b)
    assert float(inner.dynamic_scale.numpy()) == 2.0


@pytest.mark.exhaustive
def test_weights_of_several_dtypes(strategy):
    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(7, dtype="float32"), keras.layers.Dense(3, dtype="float64")]
        return keras.Sequential([keras.Input((5,)), *layers])

    x, y = problem.data(num_steps=4)
    with strategy.scope():
        model, optimizer = make(), ks.CrossShard(problem.sgd_momentum())
    weights = fit(model, x, y, optimizer=optimizer)
    reference = make()
    start = reference.get_weights()
    fit(reference, x, y, optimizer=problem.sgd_momentum())
    assert problem.relative_difference(weights, reference.get_weights(), start) <= problem.TOLERANCE


def test_outside_the_replicas_it_is_refused(strategy):
    with strategy.scope():
        model = problem.model()
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.5))
        optimizer.build(model.trainable_variables)
        with pytest.raises(ValueError, match="Use `strategy.run"):
            optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        np.testing.assert_array_equal(weight, start)


@pytest.mark.parametrize("argument", [{"gradient_accumulation_steps": 2}, {"ema_overwrite_frequency": 2}])
def test_what_cannot_work_inside_is_refused_with_its_name(strategy, argument):
    x, y = problem.data(num_steps=1)
    with strategy.scope():
        model = problem.model()
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.5, use_ema=True, **argument))
    with pytest.raises(ValueError, match=f"`{next(iter(argument))}` of the optimizer inside `CrossShard`"):
        fit(model, x, y, optimizer=optimizer)


@pytest.mark.exhaustive
def test_the_moves(strategy):
    from keras_shardopt.backends.active import runtime

    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])

    @tf.function
    def moves():
        def on_replica():
            replicas = runtime.communicator("batch")
            mine = tf.range(4.0) + 10.0 * tf.cast(replicas.replica_id, tf.float32)
            return problem.moves(replicas, mine)

        return strategy.run(on_replica)

    found = {
        name: [np.asarray(copy) for copy in strategy.experimental_local_results(value)]
        for name, value in moves().items()
    }
    problem.check_moves(found)


# -- each replica's own gradients ------------------------------------------------------------------------------------


def on_replicas(num_replicas, optimizer, num_steps=problem.NUM_STEPS, **compile_arguments):
    """Every replica's copy of the weights after `fit`."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model, made = problem.model(), optimizer()
    fit(model, *problem.data(num_steps), optimizer=made, **compile_arguments)
    copies = [[np.asarray(copy) for copy in v.value.values] for v in model.trainable_variables]
    return model, [list(mine) for mine in zip(*copies)]


def clipping(**arguments):
    return ks.CrossShard(problem.sgd_momentum(), replica_clipnorm=problem.CLIPNORM, **arguments)


@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
def test_each_replica_is_clipped_by_itself_under_fit(num_replicas):
    _, copies = on_replicas(num_replicas, clipping)
    reference = problem.replicas_in_numpy(num_replicas, problem.CLIPNORM)
    for mine, expected in zip(copies, reference):
        assert problem.relative_difference(mine, expected) <= problem.TOLERANCE


def test_clipping_in_units_of_the_loss_that_is_scaled_inside():
    def make():
        inner = keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=4096.0)
        return ks.CrossShard(inner, replica_clipnorm=problem.CLIPNORM)

    _, copies = on_replicas(2, make)
    reference = problem.replicas_in_numpy(2, problem.CLIPNORM)
    assert problem.relative_difference(copies[1], reference[1]) <= problem.TOLERANCE


@pytest.mark.exhaustive
def test_clipping_where_the_prescaling_is_forgotten_turns_the_check_red(monkeypatch):
    from keras_shardopt.backends.communicator import GradientState
    from keras_shardopt.update import replica_transform

    real = replica_transform.unit_of
    monkeypatch.setattr(
        replica_transform,
        "unit_of",
        lambda step, *rest: real(step.replace(gradient_state=GradientState.LOCAL), *rest),
    )
    with pytest.raises(AssertionError):
        test_each_replica_is_clipped_by_itself_under_fit(2)


GROUPS = [[0, 3], [1, 2]]


# Few steps where they are eager: TensorFlow then traces each of its own `all_gather`s in every step.
@pytest.mark.parametrize(
    ("eagerly", "reduction", "num_steps"),
    [(True, "mean", 5), (False, "mean", 20), (False, "sum", 20)],
)
@pytest.mark.exhaustive
def test_groups_drift_apart_under_fit(eagerly, reduction, num_steps, tmp_path):
    rate = 0.1 if reduction == "mean" else 0.02

    def make():
        return clipping_in_groups(reduction, rate)

    model, copies = on_replicas(4, make, num_steps, run_eagerly=eagerly)
    reference = problem.replicas_in_numpy(4, problem.CLIPNORM, GROUPS, reduction, rate, num_steps=num_steps)
    for mine, expected in zip(copies, reference):
        assert problem.relative_difference(mine, expected) <= problem.TOLERANCE
    for a, b in zip(copies[1], copies[2]):
        np.testing.assert_array_equal(a, b)
    assert problem.relative_difference(copies[0], copies[1]) > 1e-2
    # What a file can hold is one copy: that of replica 0.
    model.save_weights(tmp_path / "all.weights.h5")
    alone = problem.model()
    alone.load_weights(tmp_path / "all.weights.h5")
    for saved, mine in zip(alone.get_weights(), copies[0]):
        np.testing.assert_array_equal(saved, mine)


def clipping_in_groups(reduction, rate):
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    return ks.CrossShard(inner, reduction, GROUPS, replica_clipnorm=problem.CLIPNORM)


@pytest.mark.parametrize("name", some(["adam", "adamw"], ["adamw"]))
@pytest.mark.exhaustive
def test_state_of_groups_drifts_apart_in_a_loop_of_ones_own(name):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    with strategy.scope():
        weight = keras.Variable([1.0, -2.0])
        optimizer = ks.CrossShard(name, group_assignment=GROUPS, gradients="local")
        optimizer.build([weight])

    @tf.function
    def step():
        def on_replica():
            replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            optimizer.apply([tf.stack([replica, 2.0 - replica])], [weight])

        strategy.run(on_replica)

    step()
    step()
    for r, (copy, momentum) in enumerate(zip(weight.value.values, optimizer.get_slot(weight, "momentum").value.values)):
        alone = keras.Variable([1.0, -2.0])
        inner = keras.optimizers.get(name)
        inner.build([alone])
        (group,) = [group for group in GROUPS if r in group]
        mean = np.mean(group)
        for _ in range(2):
            inner.apply([tf.constant([mean, 2.0 - mean], tf.float32)], [alone])
        np.testing.assert_allclose(copy, alone.numpy(), rtol=1e-6)
        np.testing.assert_allclose(momentum, inner._momentums[0].numpy(), rtol=1e-6)


@pytest.mark.exhaustive
def test_groups_of_sparse_gradients():
    def make():
        return ks.CrossShard(problem.sgd_momentum(), group_assignment=GROUPS, replica_clipnorm=problem.CLIPNORM)

    x, y = word_data()
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    with strategy.scope():
        model, optimizer = embedding_model(), make()
    fit(model, x, y, optimizer=optimizer)
    copies = [np.asarray(copy) for copy in model.trainable_variables[0].value.values]
    np.testing.assert_array_equal(copies[0], copies[3])
    assert np.abs(copies[0] - copies[1]).max() > 1e-3


def test_on_tpu_groups_are_summed_by_the_op_that_takes_them(strategy, monkeypatch):
    """TPUs cannot be had here; that the op is called, and with what, can be seen."""
    from keras_shardopt.backends.tensorflow import communicator

    calls = []

    def recording(input, group_assignment):
        calls.append(group_assignment.numpy().tolist())
        return 2 * input

    monkeypatch.setattr(tf.raw_ops, "CrossReplicaSum", recording)
    replicas = communicator.ReplicaContext(strategy, None)
    assert not replicas._is_on_tpu
    replicas._is_on_tpu, replicas.num_replicas = True, 4
    group = replicas.split(GROUPS)
    found = group.all_reduce([tf.constant([1.0, 3.0])], "mean")
    np.testing.assert_array_equal(found[0], [1.0, 3.0])
    np.testing.assert_array_equal(group.all_reduce([tf.constant([1.0])], "sum")[0], [2.0])
    assert calls == [GROUPS, GROUPS]


def test_the_op_for_tpus_exists_and_takes_groups():
    # On this machine it has no kernel, and that is what it says.
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.NotFoundError), match="CrossReplicaSum"):
        tf.raw_ops.CrossReplicaSum(input=tf.ones(2), group_assignment=tf.constant([[0]]))


@pytest.mark.parametrize("gradients", some(["auto", "local"], ["auto"]))
@pytest.mark.parametrize("scaled", some([True, False], [True]))
def test_minimize_on_each_replica(gradients, scaled):
    """With a loss of Keras, which divides by the number of replicas, or a bare mean."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(2)])
    with strategy.scope():
        model = problem.model()
        inner = keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=512.0 if scaled else None)
        optimizer = ks.CrossShard(inner, gradients=gradients, replica_clipnorm=problem.CLIPNORM)
        optimizer.build(model.trainable_variables)
        mean_squared_error = keras.losses.MeanSquaredError()

    @tf.function
    def step(x, y):
        def on_replica(x, y):
            def loss():
                outputs = model(x, training=True)
                return mean_squared_error(y, outputs) if gradients == "auto" else tf.reduce_mean((outputs - y) ** 2)

            optimizer.minimize(loss)

        strategy.run(on_replica, args=(x, y))

    data = tf.data.Dataset.from_tensor_slices(problem.data()).batch(problem.BATCH_SIZE)
    for batch in strategy.experimental_distribute_dataset(data):
        step(*batch)
    reference = problem.replicas_in_numpy(2, problem.CLIPNORM)
    for r in range(2):
        mine = [np.asarray(v.value.values[r]) for v in model.trainable_variables]
        assert problem.relative_difference(mine, reference[r]) <= problem.TOLERANCE
