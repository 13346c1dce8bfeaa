"""TensorFlow: what `MirroredStrategy` does with CrossShard, counted and in loops of one's own."""

import keras
import numpy as np
import pytest
from support import problem

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


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(problem.sgd_momentum, id="sgd"),
        pytest.param(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1), id="adam clipped"),
        pytest.param(lambda: keras.optimizers.LossScaleOptimizer(problem.sgd_momentum()), id="loss scaling"),
        pytest.param(lambda: ks.CrossShard(problem.sgd_momentum()), id="nested"),
    ],
)
@pytest.mark.parametrize("eagerly", [True, False])
def test_exactly_one_all_reduce_per_update(strategy, reductions, make, eagerly, monkeypatch):
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
        optimizer = ks.CrossShard(make())
    fit(model, x, y, optimizer=optimizer, run_eagerly=eagerly)
    # Both replicas apply, in each step that is run or traced, and reduce the four gradients once for it.
    assert len(updates) in ([4] if eagerly else [2, 4])
    assert reductions == [4] * (len(updates) // 2)
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize("eagerly", [True, False])
def test_without_the_claim_the_inner_optimizer_would_reduce_again(strategy, reductions, monkeypatch, eagerly):
    """The count above can fail."""
    from keras_shardopt.optimizers import cross_shard

    x, y = problem.data(num_steps=1)
    monkeypatch.setattr(cross_shard, "inside", lambda optimizer: [])
    with strategy.scope():
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum())
    fit(model, x, y, optimizer=optimizer, run_eagerly=eagerly)
    assert reductions == [4, 4]


def test_the_inner_optimizer_still_reduces_when_it_is_used_alone(strategy):
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        inner = problem.sgd_momentum()
        ks.CrossShard(inner)
        model = problem.model()
    weights = fit(model, x, y, optimizer=inner)
    reference = fit(problem.model(), x, y, optimizer=problem.sgd_momentum())
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.parametrize("eagerly", [True, False])
def test_run_eagerly_equals_one_device(strategy, eagerly):
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum())
    weights = fit(model, x, y, optimizer=optimizer, run_eagerly=eagerly)
    reference = fit(problem.model(), x, y, optimizer=problem.sgd_momentum())
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.parametrize("clip", [{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
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


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("gradients", "divided"), [("local", False), ("auto", True), ("prescaled", True)], ids=["bare", "auto", "divided"]
)
def test_a_loop_of_ones_own(strategy, compiled, gradients, divided):
    x, y = problem.data(num_steps=5)
    with strategy.scope():
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum(), gradients=gradients)
        optimizer.build(model.trainable_variables)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            if divided:
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
    reference = fit(problem.model(), x, y, optimizer=problem.sgd_momentum())
    assert problem.relative_difference(model.get_weights(), reference) <= problem.TOLERANCE
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
    reference = fit(problem.model(), x, y, optimizer=problem.sgd_momentum())
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


def test_the_branch_without_merge_call(strategy, monkeypatch):
    """As on TPU and under XLA on GPUs, where replicas do not meet in a cross-replica context."""
    monkeypatch.setattr(type(strategy.extended), "_use_merge_call", lambda self: False)
    x, y = problem.data(num_steps=4)
    with strategy.scope():
        assert tf.__internal__.distribute.strategy_supports_no_merge_call()
        model, optimizer = problem.model(), ks.CrossShard(problem.sgd_momentum())
    weights = fit(model, x, y, optimizer=optimizer)
    reference = fit(problem.model(), x, y, optimizer=problem.sgd_momentum())
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.parametrize("bad_replica", [0, 1])
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
    with pytest.raises(ValueError, match=f"`{next(iter(argument))}` of an inner optimizer"):
        fit(model, x, y, optimizer=optimizer)


def test_the_moves(strategy):
    from keras_shardopt.replica import framework

    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])

    @tf.function
    def moves():
        def on_replica():
            replicas = framework.replicas("batch")
            mine = tf.range(4.0) + 10.0 * tf.cast(replicas.replica_id, tf.float32)
            return problem.moves(replicas, mine)

        return strategy.run(on_replica)

    found = {
        name: [np.asarray(copy) for copy in strategy.experimental_local_results(value)]
        for name, value in moves().items()
    }
    problem.check_moves(found)
