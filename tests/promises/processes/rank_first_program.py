"""What a Keras user adds to the first program of the README, on ranks: as in one process, or warned of.

Arguments: the file to which rank 0 writes the names of the checks that passed, and their names.
"""

import contextlib
import copy
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import warnings
from unittest import mock

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras.src.utils import module_utils
from support import checks, problem
from support.checks import check, refused

import keras_shardopt as ks
from keras_shardopt.backends.models import is_prepared
from keras_shardopt.fit import batch_logs

warnings.filterwarnings("ignore")
NUM_ROWS, ROWS_OF_RANK = 49, 8  # the last batch has one row
BATCH_SIZE = 2 * ROWS_OF_RANK
X, Y = (rows[:NUM_ROWS] for rows in problem.data(6))
VALIDATION = tuple(rows[NUM_ROWS : NUM_ROWS + 31] for rows in problem.data(6))


def compiled(scope=None, model=None, **more):
    """Of all ranks, or where there is no scope of this process."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **more.pop("optimizer", {}))
    model = problem.model() if model is None else model
    with contextlib.nullcontext() if scope else problem.alone():
        model.compile(ks.CrossShard(optimizer) if scope else optimizer, "mse", metrics=["mae"], **more)
    assert is_prepared(model) == bool(scope)
    return model


def fit(model, x=X, y=Y, validation=VALIDATION, **more):
    """The same call on all ranks as in one process."""
    given = {"epochs": 2, "shuffle": False, "verbose": 0, **more}
    return model.fit(x, y, batch_size=BATCH_SIZE, validation_data=validation, **given)


def assert_same(scope, mine, alone, weights=None):
    assert scope.largest_difference(mine) == 0
    difference = problem.relative_difference(mine.get_weights(), alone.get_weights() if weights is None else weights)
    assert difference <= problem.TOLERANCE, difference


def assert_same_logs(mine, alone):
    assert mine.keys() == alone.keys(), (mine, alone)
    for name in alone:
        np.testing.assert_allclose(mine[name], alone[name], rtol=1e-5, err_msg=name)


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def folder_of_all():
    """A folder that all ranks see."""
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path)
    yield path[0]
    dist.barrier()
    shutil.rmtree(path[0], ignore_errors=True)


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    ours = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    assert all(warning.filename == __file__ for warning in ours), [warning.filename for warning in ours]
    return [str(warning.message) for warning in ours]


def lambda_callback(name, function):
    return keras.callbacks.LambdaCallback(**{name: function})


WATCHING = {
    "reduces the rate": lambda: [keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=0.1)],
    "stops early and restores": lambda: [
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1, restore_best_weights=True)
    ],
    "schedules the rate": lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
    "swaps averages": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    "in an old script": lambda: [
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1),
        ks.callbacks.SyncReplicas(),
        ks.callbacks.CheckReplicas(every=2),
    ],
}


@check
def callbacks_that_watch_decide_as_in_one_process(scope):
    for name, make in WATCHING.items():
        more = {"optimizer": {"use_ema": True, "ema_momentum": 0.5}} if name == "swaps averages" else {}
        mine, alone = compiled(scope, **more), compiled(**more)
        history = fit(mine, epochs=6, callbacks=make())
        ours = (ks.callbacks.SyncReplicas, ks.callbacks.CheckReplicas)
        expected = fit(alone, epochs=6, callbacks=[each for each in make() if not isinstance(each, ours)])
        assert_same(scope, mine, alone)
        assert_same_logs(history.history, expected.history)
        if "stops" in name or "reduces" in name:
            plain = compiled()
            fit(plain, epochs=6)
            assert problem.relative_difference(plain.get_weights(), alone.get_weights()) > 1e-2, name


@check
def every_epoch_starts_equal(scope):
    """Also where a callback changes the rate or the weights on one rank only."""
    mine, alone = compiled(scope), compiled()

    def change(model, on_this_rank):
        def at_the_end_of(epoch, logs):
            if on_this_rank and not epoch:
                model.optimizer.learning_rate = 0.02
                model.set_weights([weight + 0.1 for weight in model.get_weights()])

        return [keras.callbacks.LambdaCallback(on_epoch_end=at_the_end_of)]

    (words,) = everywhere(warned(lambda: fit(mine, callbacks=change(mine, scope.is_chief))))[0]
    assert (
        "must begin an epoch with equal variables" in words and "learning_rate" in words and "hidden/kernel" in words
    ), words
    fit(alone, callbacks=change(alone, True))
    assert_same(scope, mine, alone)


@check
def every_fit_starts_equal_with_one_line_that_says_so(scope):
    mine, alone = compiled(scope), compiled()
    assert warned(lambda: fit(mine)) == []
    if scope.replica_id == 1:
        mine.set_weights([weight + 1 for weight in mine.get_weights()])
        mine.optimizer.learning_rate = 0.5
    (words,) = everywhere(warned(lambda: fit(mine)))[0]
    assert "All processes must begin an epoch with equal variables, so all now use the values of process 0." in words
    assert "learning_rate" in words and "hidden/kernel" in words and "momentum" not in words, words
    assert everywhere(warned(lambda: fit(mine))) == [[]] * scope.num_replicas
    for _ in range(3):
        fit(alone)
    assert_same(scope, mine, alone)


@check
def values_that_are_equal_are_not_sent_again(scope):
    model, sent = compiled(scope), []
    fit(model, epochs=1)
    real = dist.broadcast
    dist.broadcast = lambda tensor, *args, **more: (sent.append(tensor.numel()), real(tensor, *args, **more))[1]
    fit(model, epochs=1, validation=VALIDATION)
    first, sent[:] = list(sent), []
    if scope.replica_id == 1:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    fit(model, epochs=1)
    dist.broadcast = real
    num_bytes = 4 * sum(weight.size for weight in model.get_weights())
    assert max(first, default=0) < num_bytes <= max(sent), (first, sent)


@check
def logs_of_batches_are_those_of_all_ranks_where_somebody_looks(scope):
    seen = {True: [], False: []}
    for is_mine in (True, False):
        looks = lambda batch, logs, is_mine=is_mine: seen[is_mine].append(dict(logs))  # noqa: E731
        hooks = [lambda_callback("on_train_batch_end", looks)] if scope.replica_id != 1 or not is_mine else []

        class Tests(keras.callbacks.Callback):
            def on_test_batch_end(self, batch, logs=None, looks=looks):
                looks(batch, logs)

        model = compiled(scope if is_mine else None)
        fit(model, callbacks=[*hooks, Tests()], epochs=2)
    if scope.replica_id != 1:  # which looks at tests only
        assert len(seen[True]) == len(seen[False]) > 8
        for mine, alone in zip(seen[True], seen[False]):
            assert_same_logs(mine, alone)
    logs = everywhere(seen[True][-1])
    assert all(other == logs[0] for other in logs)


@check
def the_bar_shows_what_all_ranks_have(scope):
    printed = {}
    for is_mine in (True, False):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            fit(compiled(scope if is_mine else None), epochs=1, verbose=1)
        lines = output.getvalue().replace("\x08", "").replace("\r", "\n").split("\n")
        shown = [line for line in lines if "loss:" in line]
        printed[is_mine] = [line.split(" - ", 1)[1].split("step - ")[-1].strip() for line in shown]
    if scope.is_chief:
        assert printed[True][-1] == printed[False][-1], printed
        assert printed[True][0] == printed[False][0], printed  # of the first batch
    else:
        assert printed[True] == []


@check
def nobody_pays_for_logs_that_nobody_looks_at(scope):
    counts = []
    reading = [keras.callbacks.TerminateOnNaN()]
    blind = [ks.callbacks.CheckReplicas(every=1000), keras.callbacks.EarlyStopping("loss")]
    real = dist.all_reduce
    before = batch_logs.BAR_SECONDS
    for callbacks, bar_seconds in (([], None), (blind, None), (reading, None), ([], 1e9), ([], 0.0)):
        model, sent = compiled(scope), []
        batch_logs.BAR_SECONDS = bar_seconds or 0.0
        dist.all_reduce = lambda *args, sent=sent, **more: (sent.append(1), real(*args, **more))[1]
        with contextlib.redirect_stdout(io.StringIO()):
            fit(model, epochs=1, callbacks=callbacks, verbose=int(bar_seconds is not None))
        dist.all_reduce = real
        counts.append(len(sent))
    batch_logs.BAR_SECONDS = before
    num_batches = -(-NUM_ROWS // BATCH_SIZE)
    more = [count - counts[0] for count in counts]
    assert more == [0, 0, num_batches, 1, num_batches], (counts, num_batches)


@check
def a_nan_on_one_rank_ends_training_on_all_after_the_same_batch(scope):
    x = X.copy()
    x[BATCH_SIZE + ROWS_OF_RANK + 1] = np.nan  # in the second batch, on rank 1
    mine, alone = compiled(scope), compiled()
    for model in (mine, alone):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            fit(model, x=x, callbacks=[keras.callbacks.TerminateOnNaN()])
        assert output.getvalue().count("Invalid loss") == (scope.is_chief or model is alone)
    assert everywhere(int(mine.optimizer.iterations)) == [2] * scope.num_replicas
    assert int(alone.optimizer.iterations) == 2


@check
def one_file_written_by_rank_0(scope):
    written = {}
    with folder_of_all() as folder:
        for is_mine in (True, False):
            own = os.path.join(folder, "all" if is_mine else f"alone{scope.replica_id}")
            os.makedirs(own, exist_ok=True)
            name = os.path.join(own, "{epoch}.keras")
            weights = os.path.join(own, "last.weights.h5")
            best = {"save_best_only": True, "monitor": "val_loss", "initial_value_threshold": 2.0}
            callbacks = [
                keras.callbacks.ModelCheckpoint(name, verbose=1, **best),
                keras.callbacks.ModelCheckpoint(weights, save_weights_only=True, save_freq=3),
                keras.callbacks.CSVLogger(os.path.join(own, "log.csv")),
            ]
            model = compiled(scope if is_mine else None)
            with contextlib.redirect_stdout(io.StringIO()) as output, calls_of_saving() as calls:
                fit(model, callbacks=callbacks, epochs=3)
                fit(model, callbacks=callbacks, epochs=1)  # the same callbacks again
            writes = scope.is_chief or not is_mine
            assert bool(output.getvalue()) == bool(calls) == (callbacks[2].csv_file is not None) == writes
            dist.barrier()
            log = np.genfromtxt(os.path.join(own, "log.csv"), delimiter=",", names=True, ndmin=1)
            written[is_mine] = sorted(os.listdir(own)), log, [np.asarray(w) for w in values_in(own)]
    files, log, values = written[True]
    assert files == written[False][0] and "log.csv" in files, (files, written[False][0])
    assert log.dtype.names == written[False][1].dtype.names and len(log) == len(written[False][1]) == 1
    for name in log.dtype.names:
        np.testing.assert_allclose(log[name], written[False][1][name], rtol=1e-5)
    assert problem.relative_difference(values, written[False][2]) <= problem.TOLERANCE


@contextlib.contextmanager
def calls_of_saving():
    """Collects the names of the methods of models that write here."""
    calls, real = [], {name: getattr(keras.Model, name) for name in ("save", "save_weights")}
    for name, method in real.items():
        setattr(keras.Model, name, lambda *a, name=name, method=method, **k: (calls.append(name), method(*a, **k))[1])
    yield calls
    for name, method in real.items():
        setattr(keras.Model, name, method)


def values_in(folder):
    """The weights in the last file of each kind."""
    model = keras.saving.load_model(
        os.path.join(folder, sorted(f for f in os.listdir(folder) if f.endswith(".keras"))[-1])
    )
    other = problem.model()
    other.load_weights(os.path.join(folder, "last.weights.h5"))
    return [*model.get_weights(), *other.get_weights()]


class Checkpointer:
    """Orbax' one, as far as Keras' callback uses it: a step is a folder, which nobody else may make."""

    def __init__(self, directory, **policies):
        self.directory = pathlib.Path(directory)

    def save_checkpointables(self, step, payload):
        (self.directory / str(step)).mkdir(parents=True)
        weights = keras.tree.flatten(payload["pytree"]["trainable_variables"])
        self.last = step, [np.array(weight) for weight in weights]

    save_checkpointables_async = save_checkpointables

    def close(self):
        if hasattr(self, "last"):
            step, weights = self.last
            time.sleep(0.2)  # as writing goes on in the background
            np.savez(self.directory / str(step) / "weights.npz", *weights)


@contextlib.contextmanager
def stand_in_for_orbax():
    """Orbax is large, and not among the packages for tests."""
    orbax = mock.MagicMock()
    orbax.v1.training.Checkpointer = Checkpointer
    modules = {"orbax": mock.MagicMock(checkpoint=orbax), "orbax.checkpoint": orbax}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(module_utils.ocp, "module", None):
        yield


@check
def orbax_files_are_written_by_rank_0(scope):
    def saved(folder, step):
        with np.load(os.path.join(folder, step, "weights.npz")) as file:
            return [file[name] for name in file.files]

    with stand_in_for_orbax(), folder_of_all() as folder:
        path, apart = os.path.join(folder, "kept"), os.path.join(folder, "apart")
        model, alone = compiled(scope), compiled()
        fit(model, epochs=2, callbacks=[keras.callbacks.OrbaxCheckpoint(path, save_on_background=False)])
        assert sorted(os.listdir(path)) == ["0", "1"] and saved(path, "1")  # rank 0 has written all
        fit(alone, epochs=2)
        assert problem.relative_difference(saved(path, "1"), alone.get_weights()) <= problem.TOLERANCE
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), sync_every=100), "mse")
        fit(model, epochs=1, callbacks=[keras.callbacks.OrbaxCheckpoint(apart, save_freq=4)])
        np.testing.assert_equal(saved(apart, "4"), model.get_weights())  # the mean of all ranks
        model.compile(ks.CrossShard("adam", shard_state=True), "mse")
        parts = [keras.callbacks.OrbaxCheckpoint(os.path.join(folder, "parts"))]
        refused(lambda: fit(model, callbacks=parts), ValueError, "state that is divided among processes")
        weights = [keras.callbacks.OrbaxCheckpoint(os.path.join(folder, "weights"), save_weights_only=True)]
        fit(model, epochs=1, callbacks=weights)
        np.testing.assert_equal(saved(weights[0].directory, "0"), model.get_weights())


@check
def state_in_parts_is_saved_by_keras_callbacks(scope):
    def divided():
        model = problem.model()
        model.compile(ks.CrossShard(keras.optimizers.Adam(0.1), shard_state=True), "mse")
        return model

    with folder_of_all() as folder:
        path = os.path.join(folder, "model.keras")
        fit(divided(), callbacks=[keras.callbacks.ModelCheckpoint(path)], epochs=2)
        loaded = keras.saving.load_model(path)
        alone = problem.model()
        with problem.alone():
            alone.compile(keras.optimizers.Adam(0.1), "mse")
        fit(alone, epochs=2)
        assert problem.relative_difference(loaded.get_weights(), alone.get_weights()) <= problem.TOLERANCE
        assert is_prepared(loaded)
        fit(loaded, epochs=1)
        fit(alone, epochs=1)
        assert_same(scope, loaded, alone)


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


@check
def keras_own_backup_goes_on_where_training_was(scope):
    alone = compiled()
    fit(alone, epochs=4)
    with folder_of_all() as folder:
        path = os.path.join(folder, "backup")
        with contextlib.suppress(KeyboardInterrupt):
            fit(compiled(scope), callbacks=[keras.callbacks.BackupAndRestore(path), Stops()])
        dist.barrier()
        assert sorted(os.listdir(path)) == ["latest.weights.h5", "training_metadata.json"]
        mine = compiled(scope)
        callbacks = [keras.callbacks.BackupAndRestore(path, double_checkpoint=True)]
        words = everywhere(warned(lambda: fit(mine, epochs=4, callbacks=callbacks)))
        assert words == [[]] * scope.num_replicas, words
        assert mine.history.epoch == [2, 3]
        assert_same(scope, mine, alone)
        dist.barrier()
        assert not os.path.exists(path)  # training has come to its end
        if scope.replica_id == 1:  # of which one rank alone has a backup
            path = os.path.join(folder, "other")
            os.makedirs(path)
            pathlib.Path(path, "training_metadata.json").write_text('{"epoch": 1, "batch": 0}')
        again = lambda: fit(compiled(scope), callbacks=[keras.callbacks.BackupAndRestore(path)])  # noqa: E731
        refused(
            again,
            ValueError,
            "All processes must find the same backup. Received: training would continue at the epochs",
        )


@check
def keras_own_backup_that_rank_0_cannot_begin_raises_on_all_ranks(scope):
    with folder_of_all() as folder:
        no_folder = os.path.join(folder, "file")
        if scope.is_chief:
            pathlib.Path(no_folder).write_text("")
        backup = keras.callbacks.BackupAndRestore(os.path.join(no_folder, "backup"))
        refused(lambda: fit(compiled(scope), epochs=1, callbacks=[backup]), OSError, "Not a directory")
        fit(compiled(scope), epochs=1)  # the ranks still take the same turns


@check
def statistics_of_an_epoch_that_is_stopped_are_averaged_when_training_goes_on(scope):
    layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(Y.shape[1])]
    mine = compiled(scope, keras.Sequential([keras.Input(X.shape[1:]), *layers]))

    def stop(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fit(mine, validation=None, callbacks=[lambda_callback("on_train_batch_end", stop)])
    third = slice(2 * BATCH_SIZE, 3 * BATCH_SIZE)
    words = everywhere(warned(lambda: fit(mine, X[third], Y[third], validation=None, epochs=1)))
    assert words == [[]] * scope.num_replicas, words
    mean = np.zeros(X.shape[1])
    for begin in (0, BATCH_SIZE, 2 * BATCH_SIZE):
        mean = (mean + X[begin : begin + BATCH_SIZE].mean(axis=0)) / 2
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layers[0].moving_mean), mean, rtol=1e-5, atol=1e-6)
    # One rank's own are no leftovers of a stopped epoch.
    layers[0].moving_mean.assign(np.full(X.shape[1], float(scope.replica_id)))
    words = warned(lambda: fit(mine, X[third], Y[third], validation=None, epochs=1))
    assert bool(words) == scope.is_chief and all("statistics" in text for text in words), words


@check
def a_file_that_cannot_be_written_is_an_error_on_every_rank(scope):
    with folder_of_all() as folder:
        (pathlib.Path(folder) / f"{scope.replica_id}.keras").mkdir()
        path = os.path.join(folder, "0.keras")
        dist.barrier()
        saves = [keras.callbacks.ModelCheckpoint(path)]
        refused(lambda: fit(compiled(scope), callbacks=saves), OSError, "ModelCheckpoint")


class Steps(keras.Model):
    """Whose logs are no metrics of the model."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {"own": logs["loss"], "rows": keras.ops.cast(keras.ops.shape(data[0])[0], "float32"), "text": "x"}

    def test_step(self, data):
        return {"own": super().test_step(data)["loss"]}


@check
def logs_of_a_step_of_ones_own_are_the_mean_over_rows(scope):
    model = problem.model()
    mine = compiled(scope, Steps(model.inputs, model.outputs))
    batches = []
    looks = lambda_callback("on_train_batch_end", lambda batch, logs: batches.append(logs["rows"]))
    history = fit(mine, callbacks=[looks, keras.callbacks.ReduceLROnPlateau("val_own", mode="min")], epochs=2).history
    assert everywhere(history) == [history] * scope.num_replicas
    assert {"own", "val_own", "rows", "learning_rate", "text"} == set(history)
    assert batches[0] == ROWS_OF_RANK and batches[3] == history["rows"][0] == 1  # one row in the last batch, on rank 0


@check
def statistics_are_averaged_after_each_call_of_train_on_batch(scope):
    layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(Y.shape[1])]
    mine = compiled(scope, keras.Sequential([keras.Input(X.shape[1:]), *layers]))
    mean = np.zeros(X.shape[1])
    for begin in (0, BATCH_SIZE):
        own = slice(begin + scope.replica_id * ROWS_OF_RANK, begin + (scope.replica_id + 1) * ROWS_OF_RANK)
        mine.train_on_batch(X[own], Y[own])
        mean = (mean + X[begin : begin + BATCH_SIZE].mean(axis=0)) / 2
        np.testing.assert_allclose(keras.ops.convert_to_numpy(layers[0].moving_mean), mean, rtol=1e-5, atol=1e-6)


@check
def what_trains_apart_is_warned_of_once(scope):
    model = problem.model()
    words = warned(lambda: model.compile("sgd", "mse"))
    assert len(words) == scope.is_chief  # once in a job
    apart = "compiled with SGD on 2 processes: ranks would train separately. Use `keras_shardopt.CrossShard(SGD"
    assert all(apart in text for text in words)
    refused(lambda: model.fit(X, Y, verbose=0), ValueError, apart)
    refused(lambda: model.train_on_batch(X, Y), ValueError, apart)
    assert warned(lambda: model.compile(ks.CrossShard("sgd"), "mse")) == []
    with ks.data_parallel(prepare=False):
        assert warned(lambda: problem.model().compile("sgd", "mse")) == []
        model = problem.model()
        model.compile(ks.CrossShard("sgd"), "mse")
        model.fit(X[:15], Y[:15], batch_size=5, verbose=0)
    assert warned(lambda: model.fit(X[:15], Y[:15], batch_size=5, verbose=0)) == []


class Reducing(keras.Sequential):
    """Trains with DDP around its layers, as a program that came from PyTorch does."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ((self.ddp(x) - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
        return {"loss": loss}


@check
def a_plain_optimizer_may_train_what_a_ddp_reduces(scope):
    inside = problem.model()
    model = Reducing([inside])
    object.__setattr__(model, "ddp", torch.nn.parallel.DistributedDataParallel(inside))
    assert warned(lambda: model.compile("sgd", "mse")) == []
    mine = slice(scope.replica_id, None, scope.num_replicas)
    x, y = X[:-1], Y[:-1]
    model.fit(x[mine], y[mine], batch_size=ROWS_OF_RANK, epochs=2, shuffle=False, verbose=0)
    with problem.alone():
        alone = problem.model()
        alone.compile("sgd", "mse")
    assert_same(scope, model, fit(alone, x, y, validation=None).model)


@check
def weights_that_fsdp_divides_are_refused(scope):
    """Keras' layers compute with the weights from before, so that nothing would train."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = problem.model()
    for layer in model.layers[1:]:
        fully_shard(layer)
    model.compile(ks.CrossShard("sgd"), "mse")
    refused(lambda: model.fit(X, Y, verbose=0), ValueError, "under `fully_shard`. FSDP replaces the weights, but")
    # As a layer holds weights that were divided before it was made.
    variable = keras.Variable(np.ones((6, 2), "float32"))
    mesh = torch.distributed.init_device_mesh("cpu", (scope.num_replicas,))
    variable._value = torch.nn.Parameter(distribute_tensor(variable.value.detach(), mesh))
    refused(lambda: ks.CrossShard("sgd").build([variable]), ValueError, "Remove `fully_shard`")


def compiled_after_the_block(scope):
    model = problem.model()
    model.compile(ks.CrossShard("sgd"), "mse")
    train = lambda: model.fit(X[:15], Y[:15], batch_size=5, verbose=0)  # noqa: E731
    words = warned(train)
    assert len(words) == scope.is_chief
    assert all("Call `keras_shardopt.prepare(model)` after `compile`" in text for text in words), words
    assert warned(train) == []
    plain = problem.model()
    plain.compile("sgd", "mse")
    alone = lambda: plain.fit(X[:15], Y[:15], batch_size=5, verbose=0)  # noqa: E731
    words = warned(alone)
    assert len(words) == scope.is_chief
    assert all(f"SGD on {scope.num_processes} processes: ranks would train separately" in text for text in words)
    assert warned(alone) == []
    other = problem.model()
    other.compile(ks.CrossShard("sgd"), "mse")
    ks.prepare(other)
    assert warned(lambda: fit(other)) == []


class Normalized(torch.nn.Module):
    """Its buffers: moving statistics, a counter, and a mask of infinities."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((8, 8), -np.inf).triu(1))

    def forward(self, x):
        return self.norm(x.reshape(-1, 4, 2)).reshape(-1, 8) @ torch.softmax(self.mask, -1)


def with_buffers(scope, optimizer=None, rate=0.1):
    """A prepared model, and its buffers by name."""
    keras.utils.set_random_seed(2)
    wrapped = keras.layers.TorchModuleWrapper(Normalized(), output_shape=(None, 8))
    model = keras.Sequential(
        [keras.Input((problem.NUM_FEATURES,)), keras.layers.Dense(8), wrapped, keras.layers.Dense(1)]
    )
    model.compile(ks.CrossShard(keras.optimizers.SGD(rate, momentum=0.9), **(optimizer or {})), "mse")
    return model, dict(wrapped.module.named_buffers())


def assert_equal_buffers(scope, buffers):
    everyones = everywhere({name: buffer.numpy() for name, buffer in buffers.items()})
    for name, value in everyones[0].items():
        for others in everyones:
            np.testing.assert_array_equal(value, others[name], err_msg=name)
    assert not any(np.isnan(value).any() for value in everyones[0].values())


@check
def buffers_of_torch_modules_are_averaged_as_moving_statistics(scope):
    """The last batch has rows on one rank only."""
    model, buffers = with_buffers(scope, rate=0.0)
    norm, start = copy.deepcopy(model.layers[1].module.norm), copy.deepcopy(buffers)
    hidden = model.layers[0](X).detach()
    means = []
    for rank in range(scope.num_replicas):
        alone = copy.deepcopy(norm).train()
        for rows in np.array_split(np.arange(NUM_ROWS), range(BATCH_SIZE, NUM_ROWS, BATCH_SIZE)):
            mine = np.array_split(rows, scope.num_replicas)[rank]
            if len(mine):
                alone(hidden[mine].reshape(-1, 4, 2))
        means.append(alone.running_mean)
    model.fit(X, Y, batch_size=BATCH_SIZE, shuffle=False, verbose=0, callbacks=[ks.callbacks.CheckReplicas(every=1)])
    assert_equal_buffers(scope, buffers)
    found = buffers["norm.running_mean"]
    torch.testing.assert_close(found, torch.stack(means).mean(0), rtol=1e-5, atol=1e-6)
    assert (means[0] - means[1]).abs().max() > 1e-2
    assert buffers["norm.num_batches_tracked"] == 4 and torch.equal(buffers["mask"], start["mask"])
    predicted = model.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, model(X, training=False).detach().numpy(), rtol=1e-5, atol=1e-6)
    with folder_of_all() as folder:
        ks.save_model(model, f"{folder}/model.keras")
        loaded = keras.saving.load_model(f"{folder}/model.keras", safe_mode=False)
        np.testing.assert_array_equal(loaded.predict(X, verbose=0), predicted)


@check
def buffers_that_differ_are_found_and_each_fit_starts_with_those_of_rank_0(scope):
    model, buffers = with_buffers(scope)
    fit(model)
    check = ks.callbacks.CheckReplicas()
    check.set_model(model)
    check.check()
    assert scope.largest_difference(model) == 0
    buffers["norm.running_var"] += scope.replica_id == 1
    assert abs(scope.largest_difference(model) - 1) < 1e-6
    refused(check.check, RuntimeError, "module.norm.running_var` on replica 0 against replica 1")
    (words,) = everywhere(warned(lambda: fit(model)))[0]
    assert "non-trainable state" in words
    assert_equal_buffers(scope, buffers)


@check
def buffers_go_through_skipped_updates_backups_and_rounds(scope):
    x = X.copy()
    x[20] = np.nan  # a row of one rank, in the second of four batches

    class Looking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(buffers["norm.running_mean"].clone())

    seen = []
    model, buffers = with_buffers(scope, {"on_nonfinite": "skip"})
    fit(model, x, epochs=1, validation=None, callbacks=[Looking()])
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert_equal_buffers(scope, buffers)

    for options in ({}, {"sync_every": 3}):
        model, buffers = with_buffers(scope, options)
        fit(model)
        assert_equal_buffers(scope, buffers)
        expected = {name: buffer.clone() for name, buffer in buffers.items()}
        with folder_of_all() as folder:
            model, buffers = with_buffers(scope, options)
            backup = lambda: ks.callbacks.BackupAndRestore(folder, delete_checkpoint=False)  # noqa: E731
            fit(model, epochs=1, callbacks=[backup()])
            model, buffers = with_buffers(scope, options)
            fit(model, callbacks=[backup()])
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)


def main():
    file, *names = sys.argv[1:]
    with ks.data_parallel() as scope:
        kept = ks.CrossShard("sgd")
        checks.make(scope, [name for name in names if name in checks.CHECKS], dist.barrier)
        made_inside = problem.model()
    compiled_after_the_block(scope)
    scope.close()
    # The process group closes with a block that has no `CrossShard`, too; each rank would then train alone.
    made_inside.compile("sgd", "mse")
    refused(lambda: made_inside.fit(X, Y, verbose=0), ValueError, "SGD on 2 processes: ranks would train separately")
    if scope.is_chief:
        pathlib.Path(file).write_text(json.dumps(names))
    del kept


if __name__ == "__main__":
    main()
