"""save_model, save_weights and ModelCheckpoint: one process, and several that are threads here."""

import contextlib
import errno
import os
import pathlib
import stat
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from support import catalogue, problem
from support.in_parts import InParts, Processes

import keras_shardopt as ks
from keras_shardopt import atomic, saving


def trained(optimizer=None, seed=1):
    """A model with a state of its own, without the time that training takes."""
    model = problem.model()
    model.compile(optimizer or ks.CrossShard(keras.optimizers.Adam(0.01)), "mse")
    model.optimizer.build(model.trainable_variables)
    fill(model, seed)
    return model


def fill(model, seed):
    random = np.random.default_rng(seed)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        if len(variable.shape):
            variable.assign(random.normal(size=variable.shape).astype("float32"))
    model.optimizer.iterations.assign(seed)


def values(model):
    return [*model.get_weights(), *catalogue.state_of(model.optimizer)]


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others):
        np.testing.assert_array_equal(one, other)


def loaded(path):
    if str(path).endswith(".weights.h5"):
        model = trained(seed=99)
        model.load_weights(path)
        return model
    return keras.saving.load_model(path)


SAVE = {"model.keras": ks.save_model, "model.weights.h5": ks.save_weights}
both = pytest.mark.parametrize("name", SAVE)


# -- one process -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_the_file_is_the_one_of_keras(tmp_path, name, kind):
    model = trained()
    SAVE[name](model, kind(tmp_path / name))
    assert os.listdir(tmp_path) == [name]
    assert_same(values(loaded(tmp_path / name)), values(model))
    plain = problem.model()
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / name)
    assert_same(values(plain), values(model))
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o666 & ~umask


def test_the_older_format(tmp_path):
    model = trained()
    model.compile(model.optimizer, keras.losses.MeanSquaredError())
    ks.save_model(model, tmp_path / "model.h5")
    assert_same(keras.saving.load_model(tmp_path / "model.h5").get_weights(), model.get_weights())


def test_a_model_that_is_not_compiled_or_has_a_plain_optimizer(tmp_path):
    model = problem.model()
    ks.save_model(model, tmp_path / "model.keras")
    assert_same(keras.saving.load_model(tmp_path / "model.keras").get_weights(), model.get_weights())
    model = trained(keras.optimizers.Adam())
    ks.save_model(model, tmp_path / "model.keras")
    assert_same(values(keras.saving.load_model(tmp_path / "model.keras")), values(model))


@both
def test_a_link_stays_one(tmp_path, name):
    (tmp_path / "far").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "far" / name)
    SAVE[name](trained(), tmp_path / name)
    assert (tmp_path / name).is_symlink() and (tmp_path / "far" / name).is_file()
    assert os.listdir(tmp_path / "far") == [name]


def test_what_is_there_stays_without_overwrite(tmp_path):
    path = tmp_path / "model.keras"
    ks.save_model(trained(), path, overwrite=False)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=False"):
        ks.save_model(trained(seed=2), path, overwrite=False)
    assert path.read_bytes() == before
    ks.save_model(trained(seed=2), path)
    assert path.read_bytes() != before


def test_bad_paths(tmp_path):
    model = trained()
    for path, words in (
        ("model.pt", "must end in '.keras'"),
        ("gs://bucket/model.keras", "local"),
        ("a\0.keras", "local"),
    ):
        with pytest.raises(ValueError, match=f"`filepath` .*{words}"):
            ks.save_model(model, path)
    with pytest.raises(ValueError, match="must end in '.weights.h5'"):
        ks.save_weights(model, tmp_path / "model.h5")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ks.save_model(model, tmp_path / "nowhere" / "model.keras")
    (tmp_path / "folder.keras").mkdir()
    with pytest.raises(IsADirectoryError, match="a folder"):
        ks.save_model(model, tmp_path / "folder.keras")
    os.mkfifo(tmp_path / "pipe.keras")
    with pytest.raises(OSError, match="a device or pipe"):
        ks.save_model(model, tmp_path / "pipe.keras")
    with pytest.raises(ValueError, match="not yet been built"):
        ks.save_weights(keras.Sequential([keras.layers.Dense(1)]), tmp_path / "model.weights.h5")
    assert sorted(os.listdir(tmp_path)) == ["folder.keras", "pipe.keras"]


def full_disk(monkeypatch, fails=lambda key: True):
    """Makes HDF5 files fail to take (some) arrays."""
    from keras.src.saving.saving_lib import H5IOStore

    real = H5IOStore.__setitem__

    def write(self, key, value):
        if fails(f"{self._h5_entry_path}/{key}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, key, value)

    monkeypatch.setattr(H5IOStore, "__setitem__", write)


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be synchronised there")
def test_what_is_written_is_on_the_disk_before_it_has_the_name_and_then_the_name(tmp_path, monkeypatch):
    """A crash of the machine between any two of these leaves the file before or the whole new one."""
    path = tmp_path / "model.keras"
    path.write_text("before")
    model, did = trained(), []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        of = os.fstat(descriptor)
        kind = "folder" if os.path.samestat(of, os.stat(tmp_path)) else "file"
        did.append((kind, of.st_size > 10_000 if kind == "file" else None, path.read_bytes() == b"before"))
        fsync(descriptor)

    def noted_replace(source, target):
        did.append(("replace", os.fspath(target) == str(path), path.read_bytes() == b"before"))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    ks.save_model(model, path)
    assert did == [("file", True, True), ("replace", True, True), ("folder", None, False)]


@both
def test_a_full_disk_leaves_the_file_before(tmp_path, monkeypatch, name):
    SAVE[name](trained(), tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with monkeypatch.context() as patched:
        full_disk(patched, lambda place: place.startswith("optimizer"))
        with pytest.raises(OSError, match="No space left"):
            SAVE[name](trained(seed=2), tmp_path / name)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            SAVE[name](trained(seed=2), tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]


# -- several processes -----------------------------------------------------------------------------------------------


def models_in_parts(processes, wrap=ks.CrossShard):
    """For each process a model of which it has a part of the optimizer's state only, and the whole."""
    models = [trained(wrap(InParts(keras.optimizers.Adam(0.01)))) for _ in range(processes.number)]
    whole = values(models[0])
    for rank, model in enumerate(models):
        with processes.being(rank):
            next(o for o in [model.optimizer, *saving.inside(model.optimizer)] if isinstance(o, InParts)).forget()
    assert np.isnan(values(models[0])[6]).any()
    return models, whole


@both
def test_one_file_of_the_chief(tmp_path, monkeypatch, name):
    models = [trained(seed=rank) for rank in range(3)]
    processes = Processes(monkeypatch, 3)

    def save(rank):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        SAVE[name](models[rank], tmp_path / str(rank) / name)
        return (tmp_path / "0" / name).exists()

    assert processes.run(save) == [True] * 3  # nobody returns before it is there
    assert [os.listdir(tmp_path / str(rank)) for rank in range(3)] == [[name], [], []]
    assert_same(values(loaded(tmp_path / "0" / name)), values(models[0]))


@both
@pytest.mark.parametrize("wrap", [ks.CrossShard, lambda inner: ks.CrossShard(ks.LossScaling(inner))])
def test_state_in_parts_is_gathered(tmp_path, monkeypatch, name, wrap):
    processes = Processes(monkeypatch, 3)
    models, whole = models_in_parts(processes, wrap)
    assert processes.run(lambda rank: SAVE[name](models[rank], tmp_path / name)) == [None] * 3
    plain = trained(wrap(keras.optimizers.Adam(0.01)), seed=99)
    plain.load_weights(tmp_path / name)
    assert_same(values(plain), whole)
    # And each takes its part again.
    for rank, model in enumerate(models):
        with processes.being(rank):
            before = values(model)
            fill(model, 98)
            model.load_weights(tmp_path / name)
            assert_same(values(model), before)


def failing(place, monkeypatch, model):
    """Makes saving fail on the chief at some place; returns the words of the error."""
    if place == "in the description of the model":
        monkeypatch.setattr(model, "get_config", lambda: (_ for _ in ()).throw(ValueError("no description")))
        return ValueError, "no description"
    if place == "when the file is complete":
        monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no such luck")))
        return OSError, "no such luck"
    first = {"in the weights": "layers", "in the state": "optimizer/4", "after the state": "optimizer/wrapper"}
    full_disk(monkeypatch, lambda where: where.startswith(first[place]))
    return OSError, "No space left on device"


PLACES = ["in the description of the model", "in the weights", "in the state", "when the file is complete"]


@pytest.mark.parametrize("place", [*PLACES, "after the state"])
def test_what_fails_on_the_chief_fails_on_all(tmp_path, monkeypatch, place):
    path = tmp_path / "model.keras"
    ks.save_model(trained(), path)
    before = path.read_bytes()
    processes = Processes(monkeypatch, 3)
    models, _ = models_in_parts(processes, lambda inner: ks.CrossShard(ks.LossScaling(inner)))
    kind, words = failing(place, monkeypatch, models[0])
    for error in processes.run(lambda rank: ks.save_model(models[rank], path)):
        assert type(error) is kind and words in str(error), repr(error)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.keras"]
    monkeypatch.undo()
    processes = Processes(monkeypatch, 3)
    assert processes.run(lambda rank: ks.save_model(models[rank], path)) == [None] * 3  # nobody is out of step


@pytest.mark.parametrize("place", ["in the weights", "in the state"])
def test_a_chief_that_leaves_would_be_found(tmp_path, monkeypatch, place):
    """The test before, with the fault that it is for: a chief that stops taking part when its disk is full."""
    monkeypatch.setattr(saving, "steadily", lambda model: contextlib.nullcontext())
    processes = Processes(monkeypatch, 3, patience=1.0)
    models, _ = models_in_parts(processes)
    failing(place, monkeypatch, models[0])
    found = processes.run(lambda rank: ks.save_model(models[rank], tmp_path / "model.keras"))
    assert any(isinstance(error, threading.BrokenBarrierError) for error in found)


def test_arguments_that_are_wrong_on_one_process_fail_on_all(tmp_path, monkeypatch):
    model = trained()
    processes = Processes(monkeypatch, 2)
    for arguments in (
        [(model, tmp_path / "nowhere" / "a.keras"), (model, tmp_path / "a.keras")],
        [(model, tmp_path / "a.keras"), (None, tmp_path / "a.keras")],
        [(model, tmp_path / "a.txt"), (model, tmp_path / "a.keras")],
    ):
        mine, theirs = processes.run(lambda rank: ks.save_model(*arguments[rank]))  # noqa: B023
        assert type(mine) is type(theirs) and str(mine) == str(theirs)
        assert isinstance(mine, (OSError, TypeError, ValueError))
    assert os.listdir(tmp_path) == []


def test_the_older_format_cannot_have_state_in_parts(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 2)
    models, _ = models_in_parts(processes)
    for error in processes.run(lambda rank: ks.save_model(models[rank], tmp_path / "model.h5")):
        assert isinstance(error, ValueError) and "must end in '.keras'" in str(error)


def test_errors_travel_by_their_kind():
    assert isinstance(saving._error("FileNotFoundError", "x"), FileNotFoundError)
    assert isinstance(saving._error("KeyError", "x"), KeyError)
    for kind in ("UnicodeDecodeError", "OfSomeLibrary", "print"):
        error = saving._error(kind, "x")
        assert type(error) is RuntimeError and str(error) == f"{kind}: x"


# -- the callback ----------------------------------------------------------------------------------------------------

LOSSES = [3.0, 2.0, 2.5, 1.0]


def checkpoints(callback, model, losses=LOSSES, batches=3):
    """Calls it as `fit` would, with the epoch in the counter of updates."""
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, loss in enumerate(losses):
        callback.on_epoch_begin(epoch)
        for batch in range(batches):
            model.optimizer.iterations.assign(10 * epoch + batch)
            callback.on_train_batch_end(batch, {"loss": loss + 1 - batch / 10})
        callback.on_epoch_end(epoch, {"loss": loss, "val_loss": loss})
    callback.on_train_end()


def found_in(folder):
    """Which files there are, and with which update."""
    found = {}
    model = trained(seed=99)
    for name in os.listdir(folder):
        model.load_weights(folder / name)
        found[name] = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    return found


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("{epoch:02d}-{val_loss:.2f}.keras", dict()),
        ("best.keras", dict(save_best_only=True)),
        ("{epoch}.keras", dict(save_best_only=True, mode="max", monitor="loss")),
        ("{epoch}.weights.h5", dict(save_best_only=True, save_weights_only=True, initial_value_threshold=2.2)),
        ("{epoch}-{batch}.weights.h5", dict(save_weights_only=True, save_freq=4)),
    ],
)
@pytest.mark.filterwarnings("ignore:Can save best model only")
def test_the_callback_decides_as_the_one_of_keras(tmp_path, name, arguments, capsys):
    printed = []
    for folder, kind in (("their", keras.callbacks.ModelCheckpoint), ("ours", ks.callbacks.ModelCheckpoint)):
        (tmp_path / folder).mkdir()
        checkpoints(kind(tmp_path / folder / name, verbose=1, **arguments), trained())
        lines = capsys.readouterr().out.replace(f"/{folder}/", "/").splitlines()
        # The oldest Keras that is supported does not say when it has finished.
        printed.append([line for line in lines if line and "finished saving" not in line])
    assert found_in(tmp_path / "ours") == found_in(tmp_path / "their") != {}
    assert printed[0] == printed[1] != []


def test_folders_of_checkpoints_are_made(tmp_path):
    checkpoints(ks.callbacks.ModelCheckpoint(tmp_path / "a" / "{epoch}" / "b.keras"), trained(), [1.0])
    assert (tmp_path / "a" / "1" / "b.keras").is_file()


def test_all_processes_follow_the_chief(tmp_path, monkeypatch, capsys):
    """Each has logs of its own; by those of the others, other files would be written in other epochs."""
    processes = Processes(monkeypatch, 3)
    models, whole = models_in_parts(processes)
    losses = [LOSSES, LOSSES[::-1], [1.0] * 4]
    callbacks = [
        ks.callbacks.ModelCheckpoint(tmp_path / str(rank) / "{epoch}-{loss}.keras", "loss", 1, save_best_only=True)
        for rank in range(3)
    ]
    assert processes.run(lambda rank: checkpoints(callbacks[rank], models[rank], losses[rank])) == [None] * 3
    assert os.listdir(tmp_path) == ["0"]
    assert sorted(os.listdir(tmp_path / "0")) == ["1-3.0.keras", "2-2.0.keras", "4-1.0.keras"]
    assert [callback.best for callback in callbacks] == [1.0] * 3
    model = trained(seed=99)
    model.load_weights(tmp_path / "0" / "4-1.0.keras")
    assert_same(values(model)[6:], whole[6:])
    assert capsys.readouterr().out.count("finished saving") == 3


def test_a_checkpoint_that_fails_ends_training_everywhere(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 2)
    models, _ = models_in_parts(processes)
    for name, kind in (("{accuracy}.keras", KeyError), ("file/1.keras", OSError)):
        (tmp_path / "file").write_text("no folder")
        made = [ks.callbacks.ModelCheckpoint(tmp_path / name, "loss") for _ in models]
        for error in processes.run(lambda rank: checkpoints(made[rank], models[rank])):  # noqa: B023
            assert isinstance(error, kind), repr(error)


def test_a_process_that_reaches_nobody_leaves_writing_to_the_chief(tmp_path, monkeypatch):
    from keras_shardopt.replica import framework

    for rank in (1, 0):
        monkeypatch.setattr(framework, "process", lambda: (2, rank))  # noqa: B023
        monkeypatch.setattr(framework, "gather_objects", lambda value: [value])
        ks.save_model(trained(), tmp_path / "model.keras")
        checkpoints(ks.callbacks.ModelCheckpoint(tmp_path / "best.keras", "loss"), trained())
        assert sorted(os.listdir(tmp_path)) == ([] if rank else ["best.keras", "model.keras"])


def test_backups_of_state_in_parts(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 3)
    models, _ = models_in_parts(processes)
    before = [values(model) for model in models]

    def work(rank, restore):
        backup = ks.callbacks.BackupAndRestore(tmp_path if rank == 0 else "/nowhere/at/all")
        backup.set_model(models[rank])
        backup.on_train_begin() if restore else backup.on_epoch_end(0)

    from keras_shardopt.replica import framework

    # Threads share the random numbers and have no collectives of a framework.
    monkeypatch.setattr(framework, "start_equal", lambda variables, optimizer_variables: None)
    assert processes.run(lambda rank: work(rank, False)) == [None] * 3
    assert os.listdir(tmp_path) == ["backup.npz"]
    for model in models:
        weights = model.get_weights()
        fill(model, 97)
        model.set_weights(weights)
    assert processes.run(lambda rank: work(rank, True)) == [None] * 3
    for model, values_before in zip(models, before):
        assert_same(values(model), values_before)
    # An optimizer that has it whole cannot take it, and says so.
    models[:] = [trained() for _ in models]
    for error in processes.run(lambda rank: work(rank, True)):
        assert isinstance(error, ValueError) and "in parts on each replica" in str(error)


# -- what is left behind ---------------------------------------------------------------------------------------------


def test_only_what_was_left_behind_is_removed(tmp_path, monkeypatch):
    host, mine = atomic._HOST, os.getpid()
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    gone = ended.pid
    names = {
        f".keras_shardopt-{host}-{gone}-0123abcd.unfinished": False,  # its process is dead
        f".keras_shardopt-{host}-{mine}-0123abcd.unfinished": False,  # of this number, but not of this program
        f".keras_shardopt-{host}-{os.getppid()}-0123abcd.unfinished": True,  # alive
        ".keras_shardopt-elsewhere-1-0123abcd.unfinished": True,  # who knows
        ".keras_shardopt-long-ago-1-0123abcd.unfinished": False,
        ".keras_shardopt-x.unfinished": True,
        "something.unfinished": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.keras").write_text("half")
    old = tmp_path / ".keras_shardopt-long-ago-1-0123abcd.unfinished"
    for path in (old / "model.keras", old):
        os.utime(path, (0, 0))
    other = atomic.Unfinished(str(tmp_path / "other.keras"))  # being written by this very program
    ks.save_model(trained(), tmp_path / "model.keras")
    stay = {name for name, stays in names.items() if stays} | {"model.keras", os.path.basename(other._scratch)}
    assert set(os.listdir(tmp_path)) == stay
    other.discard()
