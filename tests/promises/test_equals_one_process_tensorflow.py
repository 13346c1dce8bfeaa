"""TensorFlow: what replicas compute, in numbers that are exact or those of one process."""

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


def replicas(num_replicas):
    tf.distribute.MirroredStrategy._collective_key_base += 100_000  # as `data_parallel` does
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


# -- penalties where weights have masters ----------------------------------------------------------------------------

WRAPPED = {
    "in CrossShard": lambda inner: ks.CrossShard(ks.MixedPrecision(inner)),
    "with a loss scale": lambda inner: ks.CrossShard(ks.MixedPrecision(inner, 64.0)),
    "without CrossShard": ks.MixedPrecision,
}


def in_float32(outputs):
    return 0.125 * keras.ops.sum(keras.ops.square(keras.ops.cast(outputs, "float32")))


def penalised(optimizer, prepare=False):
    """The master of a weight of 0.5 after a step in which nothing but penalties has a gradient."""
    keras.config.set_dtype_policy("bfloat16")
    half = keras.initializers.Constant(0.5)
    dense = keras.layers.Dense(
        1,
        use_bias=False,
        kernel_initializer=half,
        kernel_regularizer=keras.regularizers.L2(0.25),
        activity_regularizer=in_float32,  # Keras cannot add up penalties of several dtypes
    )
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(optimizer, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    if prepare:
        ks.prepare(model)
    x = np.ones((8, 1), "float32")
    model.fit(x, x / 2, batch_size=8, verbose=0)
    return keras.ops.convert_to_numpy(model.optimizer.get_slot(model.trainable_variables[0], "master")).item()


@functools.cache
def of_one_process(way):
    return penalised(WRAPPED[way](keras.optimizers.SGD(0.5)))


PENALISED = [*[(way, False) for way in WRAPPED], ("in CrossShard", True)]


@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
@pytest.mark.parametrize(("way", "prepare"), some(PENALISED, [("in CrossShard", True), ("without CrossShard", False)]))
def test_penalties_of_masters_are_those_of_one_process(way, prepare, num_replicas):
    alone = of_one_process(way)
    # All of these are powers of two, so that half precision is exact: 0.5 - 0.5 * (2 * 0.25 + 2 * 0.125) * 0.5. (An
    # older Keras adds up the penalties of the 8 rows.)
    if alone != 0.3125:
        pytest.skip("this Keras does not divide penalties on activities by the number of rows")
    with replicas(num_replicas).scope():
        found = penalised(WRAPPED[way](keras.optimizers.SGD(0.5)), prepare)
    assert found == alone


# -- sums ------------------------------------------------------------------------------------------------------------


SUMS = list(itertools.product([(True, 2), (True, 4), (False, 2)], [None, 2]))


@pytest.mark.parametrize(("divided", "num_steps"), some(SUMS, [((True, 2), 2)]))
def test_the_sum_of_prescaled_gradients(divided, num_steps):
    """It is N times the mean, so a rate of 1/N makes the updates of one process."""
    shard_state, num_replicas = divided

    def fitted(model, optimizer):
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(*problem.data(num_steps=4), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        return model.get_weights()

    with replicas(num_replicas).scope():
        optimizer = ks.CrossShard(
            keras.optimizers.SGD(0.1 / num_replicas, momentum=0.9),
            "sum",
            shard_state=shard_state,
            gradient_accumulation_steps=num_steps,
        )
        weights = fitted(problem.model(), optimizer)
    inner = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=num_steps)
    assert problem.relative_difference(weights, fitted(problem.model(), inner)) <= problem.TOLERANCE


# -- groups ----------------------------------------------------------------------------------------------------------


COMPRESSED = list(itertools.product(["mean", "sum"], ["bfloat16", "float16"], ["local", "prescaled"]))


@pytest.mark.parametrize(
    ("reduction", "compression", "gradients"),
    some(COMPRESSED, [("sum", "float16", "prescaled")]),
)
def test_compression_in_groups_divides_by_the_size_of_a_group(reduction, compression, gradients):
    strategy = replicas(4)
    with strategy.scope():
        weight = keras.Variable([0.0, 0.0])
        optimizer = ks.CrossShard(
            keras.optimizers.SGD(1.0),
            reduction,
            [[0, 3], [1, 2]],
            compression=compression,
            gradients=gradients,
        )
        optimizer.build([weight])

    def on_replica():
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        grad = tf.stack([2.0**replica, -replica]) / (4 if gradients == "prescaled" else 1)
        optimizer.apply([grad], [weight])

    strategy.run(on_replica)
    size = 2 if reduction == "mean" else 1
    # Few bits, so that nothing is lost.
    expected = {0: [-9 / size, 3 / size], 1: [-6 / size, 3 / size]}
    for replica, copy in enumerate(weight.value.values):
        np.testing.assert_array_equal(copy, expected[0 if replica in (0, 3) else 1])


def test_parts_go_to_the_members_of_a_group():
    from keras_shardopt.backends.tensorflow.communicator import ReplicaContext

    strategy = replicas(4)

    def on_replica():
        context = tf.distribute.get_replica_context()
        mine = tf.cast(context.replica_id_in_sync_group, tf.float32) + [0.0, 0.25, 0.5, 0.75]
        (parts,) = ReplicaContext(strategy, context).split([[0, 3], [1, 2]]).all_to_all([mine])
        return parts

    found = np.array(strategy.experimental_local_results(strategy.run(on_replica)))
    expected = [[0.0, 0.25, 3.0, 3.25], [1.0, 1.25, 2.0, 2.25], [1.5, 1.75, 2.5, 2.75], [0.5, 0.75, 3.5, 3.75]]
    np.testing.assert_array_equal(found, expected)


# -- what a custom train_step logs -----------------------------------------------------------------------------------


class Guide(keras.Model):
    """As Keras' guide writes it, with means of losses of its own."""

    def __init__(self, **more):
        super().__init__(**more)
        self.of_loss, self.of_sum, self.of_targets = (keras.metrics.Mean(name=name) for name in ("loss", "sum", "y"))
        self.loss_function = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_function(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.of_loss.update_state(loss)
        self.of_sum.update_state(loss + 0.5 * self.loss_function(y, 0 * y))
        self.of_targets.update_state(y)
        return {metric.name: metric.result() for metric in (self.of_loss, self.of_sum, self.of_targets)}


def test_means_that_a_custom_step_keeps_of_its_losses_are_those_of_one_process():
    found = {}
    x, y = problem.data(num_steps=3)
    for num_replicas in (2, 1):
        with ks.data_parallel(num_replicas) as scope:
            keras.utils.set_random_seed(3)
            plain = problem.model()
            model = Guide(inputs=plain.inputs, outputs=plain.outputs)
            model.compile(ks.CrossShard(problem.sgd_momentum()))
        arguments = {"batch_size": problem.BATCH_SIZE, "shuffle": False, "epochs": 2, "verbose": 0}
        found[num_replicas] = model.fit(x, y, **arguments).history
        scope.close()
    assert found[1].keys() == {"loss", "sum", "y"}
    for name, values in found[1].items():
        np.testing.assert_allclose(found[2][name], values, rtol=1e-5, err_msg=name)


# -- logs of a custom training step ----------------------------------------------------------------------------------


class WithoutMetrics(keras.Sequential):
    """Returns its loss, and keeps no metric of that name."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_logs_of_a_step_that_updates_no_metric_are_what_it_returns():
    seen = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
    x, y = problem.data(num_steps=2)
    with ks.data_parallel(2) as scope:
        model = WithoutMetrics(problem.model().layers)
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
        model.fit(x, y, batch_size=len(x) // 2, verbose=0, callbacks=[callback])
    scope.close()
    assert len(seen) == 2 and min(seen) > 0
