"""One process of a `jax.distributed` job: `fit`, `evaluate`, saving, callbacks, and what Keras cannot do there.

Argument: a folder, to which process 0 writes what came of it.
"""

import pathlib
import sys
import warnings

import h5py
import jax
import keras
import numpy as np
from promises.problems import flips, uneven
from support import problem, worlds
from support.checks import NullStore, refused

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.jax.placement import local_assignments
from keras_shardopt.sharding import sharded_files

warnings.filterwarnings("ignore")


def compiled(inner=None):
    model = problem.model()
    model.compile(ks.CrossShard(inner or problem.sgd_momentum()), "mse", metrics=["mae"])
    return model


def on_all(value):
    """A list of every process' value."""
    return processes.gather_objects(value)


def divided_state(scope, x, y, mine):
    """Each device keeps a part, also of other processes; files hold all, and who saves alone is told so."""
    model = problem.model()
    model.compile(ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=True), "mse")
    other = keras.Variable(np.zeros((8, 3), "float32"))
    optimizer = ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=True)
    optimizer.build([other])
    model.fit(x, y, shuffle=False, **mine)
    assert scope.largest_difference(model) == 0
    weights = model.get_weights()
    if scope.is_chief:
        np.savez(pathlib.Path(sys.argv[1]) / "divided.npz", *weights)
    # Each process writes its slices of the state and half of the weights, and reads what it needs.
    state = {}
    model.optimizer.save_own_variables(state)
    path = pathlib.Path(ks.save_sharded(model, pathlib.Path(sys.argv[1]) / "sharded"))
    sizes = [file.stat().st_size for file in sorted(path.glob("*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes), sizes
    again = problem.model()
    again.compile(ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=True), "mse")
    assert ks.load_sharded(again, path) == (len(x) // mine["batch_size"], 0)
    file = pathlib.Path(sys.argv[1]) / "divided.weights.h5"
    ks.save_weights(model, file)
    from_file = problem.model()
    from_file.compile(ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=True), "mse")
    from_file.optimizer.build(from_file.trainable_variables)
    from_file.load_weights(file)
    for each in (again, from_file):
        found = {}
        each.optimizer.save_own_variables(found)
        for one, other in zip([*each.get_weights(), *found.values()], [*weights, *state.values()], strict=True):
            np.testing.assert_array_equal(one, other)
    slot = optimizer.variables[2]
    assert not slot.value.is_fully_addressable and not slot.value.is_fully_replicated
    values = np.arange(24, dtype="float32").reshape(8, 3)
    optimizer.load_own_variables({"0": 3, "1": 0.5, "2": values, "3": -values})
    real, sharded_files.BARRIER_SECONDS = sharded_files.BARRIER_SECONDS, 0.5
    for alone in (0, 1):
        if scope.process_id == alone:
            refused(lambda: optimizer.save_own_variables({}), RuntimeError, "save_model(model, path)` (or")
        on_all(alone)
    sharded_files.BARRIER_SECONDS = real
    with local_assignments():  # as in `fit` of a prepared model
        slot.assign(2 * values)
    store = {} if scope.is_chief else NullStore()
    optimizer.save_own_variables(store)
    if scope.is_chief:
        assert (store["2"] == 2 * values).all() and (store["3"] == -values).all()
    report = optimizer.memory_report()
    assert report.held == [56] * 4 and report.whole == 200, str(report)


def main():
    folder = pathlib.Path(sys.argv[1])
    # A warning comes from process 0 only, and starts no JAX, whose processes are connected before that.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ks.schedules.CosineDecay(0.1, 10, power=2)
        keras.distribution.initialize()
        ks.schedules.CosineDecay(0.1, 10, power=2)
    ours = [each.filename for each in caught if "`power`" in str(each.message)]  # JAX 0.8 has one of its own
    assert ours == 2 * [__file__] * (jax.process_index() == 0)
    with ks.data_parallel(prepare=False) as scope:
        assert (scope.num_replicas, scope.num_processes) == (4, 2)
        assert scope.process_id == jax.process_index() and scope.replica_id == 2 * scope.process_id
        assert scope.is_chief == (scope.process_id == 0)
        model = compiled()
    x, y = (problem.rows_of_replica(a, scope.process_id, scope.num_processes) for a in problem.data())
    mine = dict(batch_size=problem.BATCH_SIZE // scope.num_processes, verbose=0)

    assert on_all("x" * (3 + scope.process_id)) == ["xxx", "xxxx"]
    callbacks = [ks.callbacks.SyncReplicas(), ks.callbacks.CheckReplicas(7), keras.callbacks.EarlyStopping("loss")]
    history = model.fit(x, y, shuffle=False, callbacks=callbacks, **mine).history
    metrics = model.evaluate(x, y, return_dict=True, **mine)
    assert all(other == (history, metrics) for other in on_all((history, metrics)))
    variables = [*model.trainable_variables, *model.optimizer.variables]
    arrays = [np.asarray(v.value) for v in variables]
    for theirs in on_all(arrays):
        assert all((a == b).all() for a, b in zip(theirs, arrays))
    assert scope.largest_difference(model) == 0

    # Saving: all enter, process 0 writes.
    own = folder if scope.is_chief else folder / "others"
    ks.save_model(model, own / "model.keras")
    ks.save_weights(model, own / "model.weights.h5")
    assert (folder / "model.keras").is_file() and (folder / "model.weights.h5").is_file()
    refused(lambda: ks.save_model(model, own / "nowhere" / "model.keras"), FileNotFoundError, f"`{folder}/nowhere")
    parts = compiled(worlds.InParts(problem.sgd_momentum()))
    callbacks = [ks.callbacks.ModelCheckpoint(own / "parts.weights.h5", "loss", save_weights_only=True)]
    parts.fit(x, y, shuffle=False, callbacks=callbacks, **mine)
    assert not (folder / "others").exists()
    # Keras' own saving, too: all enter, because it makes variables on the way, on which JAX lets the processes agree.
    own = folder / f"own{scope.process_id}"
    own.mkdir()
    model.save(own / "model.keras")
    if scope.is_chief:
        values = {f"variable{i}": array for i, array in enumerate(arrays)}
        np.savez(folder / "results.npz", **metrics, **values, history=history["loss"])

    # What is loaded can be read when all processes have built the optimizer.
    again = compiled()
    again.load_weights(folder / "model.weights.h5")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert again.optimizer.iterations.value == 0
        again.optimizer.build(again.trainable_variables)
        assert again.optimizer.iterations.value == problem.NUM_STEPS
    assert [str(each.message)[:5] for each in caught] == ["Call "] * scope.is_chief

    divided_state(scope, x, y, mine)

    # A bit that flips on one device of one process is found by both.
    check = ks.callbacks.CheckReplicas()
    check.set_model(model)
    if scope.process_id == 1:
        flips.flip(model.optimizer.variables[2], 1, 4, 17)
    path = model.optimizer.variables[2].path
    refused(check.check, RuntimeError, f"`{path}` on replica 3, against replicas 0, 1 and 2")

    # Processes that start apart: all take what process 0 has, zeros with a sign too.
    def spoil(array):
        array.flat[0] = -0.0 if scope.is_chief else scope.process_id

    model.jax_state_sync()
    for variable in [*model.variables, *model.optimizer.variables]:
        for device in range(2):
            flips.change(variable, device, spoil)
    refused(check.check, RuntimeError, "`mlp/hidden/kernel` on replicas 0 and 1 against replicas 2 and 3")
    sync = ks.callbacks.SyncReplicas()
    sync.set_model(model)
    sync.on_train_begin()
    check.check()
    assert np.signbit(np.asarray(model.trainable_variables[0].value).flat[0])
    refused(
        lambda: placement.broadcast_state(model.variables[scope.process_id :], []), ValueError, "same model variables"
    )
    logs = {"loss": float(scope.process_id)}
    sync.on_epoch_end(0, logs)
    assert logs == {"loss": 0.5}
    logs = {"loss": 0.0} if scope.is_chief else {"loss": 0.0, "mae": 0.0}
    refused(lambda: sync.on_epoch_end(0, logs), ValueError, "on process 0, ['loss', 'mae'] on process 1")

    # Uneven parts of each batch, a process without a batch left, one without any.
    unequal = {}
    case = uneven.CASES["divided by weights"]
    other = ks.prepare(uneven.compiled(**case), auto_shard=False)  # one, whose steps are compiled once
    other.optimizer.build(other.trainable_variables)
    start = [(v, keras.ops.convert_to_numpy(v)) for v in [*other.variables, *other.optimizer.variables]]
    for division in (uneven.divided, uneven.some_without, uneven.all_on_the_last):
        for variable, value in start:
            variable.assign(value)
        rows = division(scope.process_id, scope.num_processes)
        parts = uneven.Batches(case, rows)
        history = other.fit(parts, validation_data=parts, shuffle=False, verbose=2).history
        assert on_all(history)[0] == history
        unequal |= {f"{division.__name__}/log/{name}": values for name, values in history.items()}
        unequal |= {f"{division.__name__}/weight{i}": weight for i, weight in enumerate(other.get_weights())}
    if scope.is_chief:
        np.savez(folder / "uneven.npz", **unequal)

    # Each `fit` of a prepared model begins with the values of process 0, and says so.
    check.set_model(other)
    other.jax_state_sync()
    spoiled = [other.trainable_variables[0], None, other.optimizer.variables[2]]
    said = []
    for variable in spoiled:
        if variable is not None:
            for device in range(2):
                flips.change(variable, device, spoil)
            refused(check.check, RuntimeError, "on replicas 0 and 1 against replicas 2 and 3")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = keras.callbacks.ModelCheckpoint(folder / "kept.weights.h5", save_weights_only=True)
            log = keras.callbacks.CSVLogger(folder / "log.csv")
            other.fit(parts, shuffle=False, verbose=0, callbacks=[kept, log])
        assert (log.csv_file is not None) == scope.is_chief
        said.append(
            [str(each.message) for each in caught if "must begin an epoch with equal variables" in str(each.message)]
        )
        check.check()
    assert [len(words) for words in said] == [int(scope.is_chief and v is not None) for v in spoiled], said
    for variable, words in zip(spoiled, said):
        assert not words or variable.path in words[0]
    with h5py.File(folder / "kept.weights.h5") as file:  # by process 0, which the others have waited for
        assert len(file) > 0

    # One process trains something else: both say so before either has made a variable for it.
    odd = scope.process_id == 1
    untrained = problem.model()
    for other, words in (
        (lambda: ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=2), "`gradient_accumulation_steps`"),
        (lambda: ks.CrossShard(keras.optimizers.RMSprop(0.1)), "class of optimizer 1"),
        (lambda: ks.CrossShard(problem.sgd_momentum(), reduction="sum"), "`reduction` of optimizer 0 (CrossShard)"),
    ):
        differing = other() if odd else ks.CrossShard(problem.sgd_momentum())
        refused(lambda: differing.build(untrained.trainable_variables), ValueError, words)  # noqa: B023 - called at once
        assert not differing.built

    # `clear_session` takes the distribution away: nobody trains alone from there on.
    distribution = keras.distribution.distribution()
    keras.backend.clear_session()
    alone = compiled()
    refused(lambda: alone.fit(x, y, **mine), ValueError, "must stay active")
    keras.distribution.set_distribution(distribution)

    # `predict` would gather outputs from devices that other processes have; a local copy of the model predicts.
    refused(lambda: model.predict(x[:8], **mine), RuntimeError, "`predict` needs the same data")
    weights = model.get_weights()
    scope.close()
    copy = keras.models.clone_model(model)
    copy.set_weights(weights)
    predicted = copy.predict(x[:5], verbose=0)
    if scope.is_chief:
        np.savez(folder / "predicted.npz", *weights, predicted=predicted)


main()
