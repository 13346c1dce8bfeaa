"""One worker of a `MultiWorkerMirroredStrategy`: a custom training loop, callbacks, and what Keras cannot do there.

In the end worker 1 kills itself, and worker 0 looks how that reaches it.

Argument: the file to which worker 0 writes weights and optimizer state.
"""

import os
import pathlib
import signal
import sys
import time

import h5py
import keras
import numpy as np
import tensorflow as tf
from promises.problems import flips
from support import problem, worlds
from support.checks import refused
from support.launch import patient

import keras_shardopt as ks
from keras_shardopt.backends.active import placement


class Count(keras.layers.Layer):
    """Counts on each worker; read as the sum."""

    def build(self, shape):
        self.count = keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")

    def add(self, number):
        self.count.value.assign_add(number)

    def call(self, inputs):
        return inputs


def main():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope(), ks.data_parallel(prepare=False) as scope:
        assert (scope.num_replicas, scope.num_processes) == (2, 2)
        assert scope.process_id == scope.replica_id and scope.is_chief == (scope.process_id == 0)
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum())
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
    x, y = problem.data()
    mine = [problem.rows_of_replica(a, scope.process_id, scope.num_processes) for a in (x, y)]

    # Refused before anything changes.
    words = "cannot run under a `MultiWorkerMirroredStrategy`"
    refused(lambda: model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0), ValueError, words)
    refused(lambda: model.evaluate(x, y, batch_size=problem.BATCH_SIZE, verbose=0), ValueError, words)
    refused(lambda: model.train_on_batch(x[:4], y[:4]), ValueError, words)
    assert all((a == b).all() for a, b in zip(model.get_weights(), problem.start_weights()))
    assert int(optimizer.iterations.numpy()) == 0

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / strategy.num_replicas_in_sync
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(on_replica, args=(x, y)), axis=None)  # reduces as usual

    batches = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices(tuple(mine)).batch(problem.BATCH_SIZE // 2)
    )
    losses = [float(step(*batch)) for batch in batches]
    assert len(losses) == problem.NUM_STEPS and losses[-1] < losses[0]

    check = ks.callbacks.CheckReplicas()
    check.set_model(model)
    check.check()
    variables = [*model.trainable_variables, *optimizer.variables]
    assert placement.fingerprints(variables).shape == (2, len(variables))
    if scope.process_id == 1:
        flips.flip(optimizer.variables[2], 0, 1, 30)
    try:
        check.check()
    except RuntimeError as error:
        assert f"`{optimizer.variables[2].path}` on replica 0 against replica 1" in str(error), str(error)
    else:
        raise AssertionError("a flipped bit was not found")
    if scope.process_id == 1:
        flips.flip(optimizer.variables[2], 0, 1, 30)
    check.check()
    folder = pathlib.Path(sys.argv[1]).parent
    mine = folder if scope.is_chief else folder / "others"
    # In the scope of the strategy, and outside it; and with a variable of which each worker has its own.
    with strategy.scope():
        ks.save_model(model, mine / "inside.keras")
        assert (folder / "inside.keras").is_file()
    ks.save_weights(model, mine / "outside.weights.h5")
    assert (folder / "outside.weights.h5").is_file()
    refused(
        lambda: ks.save_model(model, mine / "model.txt"), ValueError, f"Received: filepath={folder / 'model.txt'!r}"
    )
    with strategy.scope():
        weight, coded = keras.Variable([1.0]), ks.CrossShard("sgd", compression="int8")
        coded.build([weight])
    refused(
        lambda: strategy.run(lambda: coded.apply([tf.constant([1.0])], [weight])),
        ValueError,
        "this `compression` needs a `MirroredStrategy`",
    )
    with strategy.scope():
        count = Count()
        counting = keras.Sequential([keras.Input((2,)), count])
        counting.compile(ks.CrossShard(worlds.InParts(problem.sgd_momentum())), "mse")
    strategy.run(count.add, args=(scope.process_id + 1.0,))
    ks.save_model(counting, mine / "counting.keras")
    ks.save_weights(counting, mine / "counting.weights.h5")
    # The state is gathered in the one way and the other, and inside the scope and outside.
    with strategy.scope():
        parts = problem.model()
        parts.compile(ks.CrossShard(worlds.InParts(problem.sgd_momentum())), "mse")
        parts.optimizer.build(parts.trainable_variables)
        parts.optimizer.set_weights(model.optimizer.variables)
        parts.optimizer.inner.forget()
        ks.save_model(parts, mine / "parts.keras")
    ks.save_weights(parts, mine / "parts.weights.h5")
    assert not (folder / "others").exists()
    for name in ("parts.keras", "parts.weights.h5"):
        with strategy.scope():
            whole = problem.model()
            whole.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
            whole.optimizer.build(whole.trainable_variables)
            whole.load_weights(folder / name)
        for one, other in zip(whole.optimizer.variables, model.optimizer.variables):
            assert (keras.ops.convert_to_numpy(one) == keras.ops.convert_to_numpy(other)).all(), name
    path = ks.save_sharded(model, folder / "sharded")  # each worker writes its share
    assert len(list(pathlib.Path(path).glob("*.safetensors"))) == scope.num_processes
    with strategy.scope():
        again = problem.model()
        again.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
        ks.load_sharded(again, path)
    for one, other in zip([*again.weights, *again.optimizer.variables], [*model.weights, *model.optimizer.variables]):
        assert (keras.ops.convert_to_numpy(one) == keras.ops.convert_to_numpy(other)).all(), one.path
    if scope.is_chief:
        with h5py.File(folder / "counting.weights.h5") as file:
            assert file["layers/count/vars/0"][()] == 3.0, "the sum over both"
        arrays = [keras.ops.convert_to_numpy(v) for v in variables]
        np.savez(sys.argv[1], **{f"variable{i}": array for i, array in enumerate(arrays)})

    # One worker trains something else: both say so before either has made a variable for it.
    odd = scope.process_id == 1
    for other, words in (
        (lambda: ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=2), "`gradient_accumulation_steps`"),
        (lambda: ks.CrossShard(keras.optimizers.RMSprop()), "class of optimizer 1"),
        (lambda: ks.CrossShard(problem.sgd_momentum(), reduction="sum"), "`reduction` of optimizer 0 (CrossShard)"),
    ):
        with strategy.scope():
            differing = other() if odd else ks.CrossShard(problem.sgd_momentum())
            refused(lambda: differing.build(model.trainable_variables), ValueError, words)  # noqa: B023 - called at once
            assert not differing.built

    # A worker dies: the other ends with an error that names it, at once.
    died = pathlib.Path(sys.argv[1]).with_suffix(".died")
    batch = tf.constant(x[:4]), tf.constant(y[:4])
    compiled = tf.function(lambda: strategy.run(on_replica, args=batch))
    for number in range(1000):
        if odd and number == 5:
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            compiled()
        except tf.errors.UnavailableError as error:
            assert "task:1" in str(error), str(error)
            seconds = time.time() - float(died.read_text())
            assert seconds < patient(15), seconds  # 0.1 s, unless it is TensorFlow's heartbeats (10 s) that tell
            print("worker 0 has noticed", flush=True)
            os._exit(0)  # past what TensorFlow wants to tell the other at the end


main()
