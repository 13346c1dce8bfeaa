"""One worker of two, with two devices: `fit` and what goes with it, in a strategy that `data_parallel` opens.

Argument: a folder, to which worker 0 writes what came of it.
"""

import pathlib
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf
from promises.problems import restarting, uneven
from support import problem
from support.checks import refused

import keras_shardopt as ks
from keras_shardopt.backends.active import processes

warnings.filterwarnings("ignore")
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


class OwnStep(keras.Sequential):
    """A training step that returns what each replica has seen of its rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"largest": tf.reduce_max(x)}


class StopsAtALargeBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.seen = logs
        self.model.stop_training = True


class Noting(keras.callbacks.Callback):
    """Keeps the logs of each batch of `fit`."""

    def on_train_begin(self, logs=None):
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append([float(logs[name]) for name in sorted(logs)])


def on_all(scope, value):
    with scope_of(scope):
        return processes.gather_objects(value)


def scope_of(model):
    return model.distribute_strategy.scope()


def main():
    folder = pathlib.Path(sys.argv[1])
    with ks.data_parallel(4) as scope:
        assert (scope.num_replicas, scope.num_processes) == (4, 2)
        assert scope.replica_id == 2 * scope.process_id and scope.is_chief == (scope.process_id == 0)
        model = problem.model()
        metrics = ["mae", keras.metrics.RootMeanSquaredError(name="root")]
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", metrics=metrics)
    x, y = problem.data()
    own = folder if scope.is_chief else folder / "nowhere"
    noting = Noting()
    callbacks = [
        noting,
        ks.callbacks.CheckReplicas(7),
        ks.callbacks.ModelCheckpoint(own / "kept.weights.h5", save_weights_only=True),
    ]
    fit = dict(batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    history = model.fit(x, y, callbacks=callbacks, **fit).history
    metrics = model.evaluate(x, y, batch_size=problem.BATCH_SIZE, return_dict=True, verbose=0)
    predicted = model.predict(x[:37], batch_size=10, verbose=0)
    mine = history, metrics, predicted, noting.logs
    assert all(str(each) == str(mine) for each in on_all(model, mine))
    assert scope.largest_difference(model) == 0
    ks.save_model(model, own / "model.keras")
    assert (folder / "model.keras").is_file() and not (folder / "nowhere").exists()
    found = {
        f"variable{i}": keras.ops.convert_to_numpy(v)
        for i, v in enumerate([*model.trainable_variables, *model.optimizer.variables])
    }
    found |= {"predicted": predicted, "history": history["loss"], "batches": noting.logs, **metrics}
    # What is each worker's own: rows that it gives, and predictions that it makes alone.
    np.testing.assert_allclose(model.predict_on_batch(x[:3]), predicted[:3], rtol=1e-5)
    number = 3 + scope.process_id
    mine = ks.prepare(model, gather=False).predict(x[:number], batch_size=4, verbose=0)
    np.testing.assert_allclose(mine, predicted[:number], rtol=1e-5)
    ks.prepare(model, gather=True)
    rows = slice(0, 11) if scope.is_chief else slice(11, 16)
    losses = []
    for call in (model.test_on_batch, model.train_on_batch):
        model.reset_metrics()  # which Keras 3.12 leaves to the caller
        losses.append(call(x[rows], y[rows])[0])
    assert len(set(map(str, on_all(model, losses)))) == 1
    found |= {"on_batch": losses, "after_batch": model.trainable_variables[0].numpy()}

    # Workers that train on the same rows are told so, unless each takes a part of every batch.
    for auto_shard in (False, True):
        ks.prepare(model, auto_shard=auto_shard)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x[:16], y[:16], **fit)
        said = [str(each.message) for each in caught if "repeat the same work" in str(each.message)]
        assert len(said) == int(scope.is_chief and not auto_shard), said

    # Uneven parts of each batch, a worker without a batch left, one without any.
    case = uneven.CASES["divided by weights"]
    with ks.data_parallel(auto_shard=False):
        other = uneven.compiled(**case)
        other.optimizer.build(other.trainable_variables)
    start = [(v, keras.ops.convert_to_numpy(v)) for v in [*other.variables, *other.optimizer.variables]]
    for division in (uneven.divided, uneven.some_without):
        for variable, value in start:
            variable.assign(value)
        parts = uneven.Batches(case, division(scope.process_id, scope.num_processes))
        history = other.fit(parts, validation_data=parts, shuffle=False, verbose=0).history
        assert on_all(other, history)[0] == history
        found |= {f"{division.__name__}/log/{name}": values for name, values in history.items()}
        found |= {f"{division.__name__}/weight{i}": weight for i, weight in enumerate(other.get_weights())}

    # `steps_per_epoch` goes on in the next epoch where it has stopped; an epoch begins equal on all.
    with ks.data_parallel():
        stepping = problem.model()
        inner = ks.LossScaling(ks.GradientClipping(problem.sgd_momentum(), 1.0))
        stepping.compile(ks.CrossShard(inner, gradient_accumulation_steps=2, on_nonfinite="skip"), "mse")
    if scope.process_id == 1:
        stepping.set_weights([0 * w for w in stepping.get_weights()])
    assert scope.largest_difference(stepping) == max(float(np.abs(w).max()) for w in problem.start_weights())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(problem.BATCH_SIZE).repeat()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepping.fit(data, steps_per_epoch=10, epochs=2, verbose=0)
    said = [str(each.message) for each in caught if "must begin an epoch with equal variables" in str(each.message)]
    assert len(said) == int(scope.is_chief), said
    found |= {f"stepping{i}": weight for i, weight in enumerate(stepping.get_weights())}
    bad = np.array(x[: problem.BATCH_SIZE])
    bad[-1] = np.nan  # on the last replica
    stepping.fit(bad, y[: problem.BATCH_SIZE], batch_size=8, verbose=0)
    assert all((a == found[f"stepping{i}"]).all() for i, a in enumerate(stepping.get_weights()))

    # The second device of worker 0 gets another weight, and both workers name it.
    def change_one_copy(batch, logs):
        if scope.is_chief:
            copy = stepping.trainable_variables[0].value.values[1]
            copy.assign(copy + 1)

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=change_one_copy), ks.callbacks.CheckReplicas(1)]
    refused(lambda: stepping.fit(x, y, callbacks=callbacks, **fit), RuntimeError, "kernel` on replica 1")

    # A step of the model's own; logs of a batch are equal on all, or some would stop and others not.
    with ks.data_parallel():
        stopped = StopsAtALargeBatch()
        keras.utils.set_random_seed(5)
        custom = OwnStep(restarting.layers())
        custom.compile(ks.CrossShard(restarting.adam()), "mse")
    custom.fit(x[:64], y[:64], batch_size=16, shuffle=False, verbose=0, callbacks=[stopped])
    whole = np.mean([x[4 * i : 4 * i + 4].max() for i in range(4)])
    np.testing.assert_allclose(float(stopped.seen["largest"]), whole, rtol=1e-6)

    # Backups of this package: worker 0 writes, the others have no folder.
    for epochs in (1, 2):
        backup = ks.callbacks.BackupAndRestore(own / "backup", delete_checkpoint=False)
        custom.fit(x[:48], y[:48], batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[backup])
    assert (folder / "backup").is_dir() and not (folder / "nowhere").exists()

    # What differs is an error on all, and so is what cannot be done here.
    other = x if scope.is_chief else x + 1
    refused(
        lambda: model.fit(other, y, **fit), ValueError, "first batches that differ from those of process 0 on process 1"
    )
    refused(
        lambda: model.fit(x, y, **fit) if scope.is_chief else model.evaluate(x, y),
        ValueError,
        "process 1 calls `evaluate`",
    )
    number = 4 + scope.process_id
    refused(lambda: model.predict(x[:number], verbose=0), ValueError, "first batches that differ")
    with ks.data_parallel():
        sharded = problem.model()
        sharded.compile(ks.CrossShard(problem.sgd_momentum(), shard_state=True), "mse")
    refused(
        lambda: sharded.fit(x, y, **fit),
        ValueError,
        "`shard_state=True` needs a `MirroredStrategy`",
    )
    with ks.data_parallel():
        grouped = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum(), group_assignment=[[0, 1], [2, 3]])
        grouped.compile(optimizer, "mse")
    refused(lambda: grouped.fit(x, y, **fit), ValueError, "with `group_assignment` needs a custom training loop")
    refused(lambda: ks.prepare(grouped), ValueError, "groups train separately")
    refused(
        lambda: ks.data_parallel(2).__enter__(),
        ValueError,
        "`num_replicas` must be the number of devices of all workers",
    )
    if scope.is_chief:
        np.savez(folder / "results.npz", **found)


main()
