"""save_model, save_weights and ModelCheckpoint: one process, and several that are threads here."""

import contextlib
import errno
import itertools
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
from support.suites import some
from support.worlds import InParts, Processes

import keras_shardopt as ks
from keras_shardopt.checkpoint import atomic_file as atomic
from keras_shardopt.checkpoint import saving, together
from keras_shardopt.wrapping.chain import chain_of


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
# Files and processes that are threads are the same Python on all backends; with real processes, each backend of which
# has them does this in test_several_processes_torch.py.
same = pytest.mark.exhaustive("jax", "tensorflow")


# -- one process -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", some([str, pathlib.Path], [pathlib.Path], "jax", "tensorflow"))
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


@both
@pytest.mark.exhaustive("jax", "tensorflow")
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
            next(o for o in chain_of(model.optimizer) if isinstance(o, InParts)).forget()
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


WRAPS = {"alone": ks.CrossShard, "loss scaling": lambda inner: ks.CrossShard(ks.LossScaling(inner))}
IN_PARTS = list(itertools.product(SAVE, WRAPS))


@pytest.mark.parametrize(("name", "wrap"), some(IN_PARTS, [("model.keras", "loss scaling")], "jax", "tensorflow"))
def test_state_in_parts_is_gathered(tmp_path, monkeypatch, name, wrap):
    wrap = WRAPS[wrap]
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


@same
def test_two_optimizers_with_state_in_parts_are_gathered_in_the_order_of_the_saver(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 2)
    models, whole = models_in_parts(processes)
    for rank, model in enumerate(models):
        model.a_second = ks.CrossShard(InParts(keras.optimizers.Adam(0.01)))  # which the saver comes to first
        model.a_second.build(model.trainable_variables)
        for variable in model.a_second.variables:
            variable.assign(keras.ops.full(variable.shape, 7, variable.dtype))
        with processes.being(rank):
            model.a_second.inner.forget()
    path = tmp_path / "model.weights.h5"
    assert processes.run(lambda rank: ks.save_weights(models[rank], path)) == [None] * 2
    plain = trained(seed=99)
    plain.a_second = ks.CrossShard(keras.optimizers.Adam(0.01))
    plain.a_second.build(plain.trainable_variables)
    plain.load_weights(path)
    assert_same(values(plain), whole)
    assert all(np.all(keras.ops.convert_to_numpy(variable) == 7) for variable in plain.a_second.variables)


@same
@pytest.mark.parametrize("fails", [False, True])
def test_what_keras_writes_to_another_machine_is_written_by_the_chief_alone(monkeypatch, fails):
    """Where Keras can write, and no file be replaced: its own `ModelCheckpoint` may have such a path."""
    models = [ks.prepare(trained(seed=rank)) for rank in range(2)]
    processes = Processes(monkeypatch, 2)
    written = []

    def save(model, filepath):
        written.append((models.index(model), filepath))
        if fails:
            raise OSError("no such bucket")

    monkeypatch.setattr(keras.Model, "save", save)

    def save_here(rank):
        with saving.saving_together(models[rank]):
            models[rank].save("gs://bucket/model.keras")

    results = processes.run(save_here)
    assert written == [(0, "gs://bucket/model.keras")]
    if fails:
        assert [(type(error), str(error)) for error in results] == [(OSError, "no such bucket")] * 2
    else:
        assert results == [None, None]


def failing(place, monkeypatch, model):
    """Makes saving fail on rank 0 at some place; returns the words of the error."""
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


@pytest.mark.parametrize("place", some([*PLACES, "after the state"], ["in the state"], "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
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


@same
@pytest.mark.parametrize("place", ["in the weights", "in the state"])
def test_a_chief_that_leaves_would_be_found(tmp_path, monkeypatch, place):
    """The test before, with the fault that it is for: a rank 0 that stops taking part when its disk is full."""
    monkeypatch.setattr(saving, "gather_despite_errors", lambda model: contextlib.nullcontext())
    processes = Processes(monkeypatch, 3, patience=1.0)
    models, _ = models_in_parts(processes)
    failing(place, monkeypatch, models[0])
    found = processes.run(lambda rank: ks.save_model(models[rank], tmp_path / "model.keras"))
    assert any(isinstance(error, threading.BrokenBarrierError) for error in found)


@same
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


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_older_format_cannot_have_state_in_parts(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 2)
    models, _ = models_in_parts(processes)
    for error in processes.run(lambda rank: ks.save_model(models[rank], tmp_path / "model.h5")):
        assert isinstance(error, ValueError) and "must end in '.keras'" in str(error)


def test_errors_travel_by_their_kind():
    assert isinstance(together._error("FileNotFoundError", "x"), FileNotFoundError)
    assert isinstance(together._error("KeyError", "x"), KeyError)
    for kind in ("UnicodeDecodeError", "OfSomeLibrary", "print"):
        error = together._error(kind, "x")
        assert type(error) is RuntimeError and str(error) == f"{kind}: x"
        assert str(together._error(kind, "")) == kind
    assert type(together._error("OSError", "")) is OSError and str(together._error("OSError", "")) == ""


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


CHECKPOINTS = [
    ("{epoch:02d}-{val_loss:.2f}.keras", dict()),
    ("best.keras", dict(save_best_only=True)),
    ("{epoch}.keras", dict(save_best_only=True, mode="max", monitor="loss")),
    ("{epoch}.weights.h5", dict(save_best_only=True, save_weights_only=True, initial_value_threshold=2.2)),
    ("{epoch}-{batch}.weights.h5", dict(save_weights_only=True, save_freq=4)),
]


@pytest.mark.parametrize(("name", "arguments"), some(CHECKPOINTS, [CHECKPOINTS[3]], "jax", "tensorflow"))
@pytest.mark.filterwarnings("ignore:Can save best model only")
@pytest.mark.exhaustive("jax", "tensorflow")
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


@same
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


@same
def test_a_checkpoint_that_fails_ends_training_everywhere(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 2)
    models, _ = models_in_parts(processes)
    for name, kind in (("{accuracy}.keras", KeyError), ("file/1.keras", OSError)):
        (tmp_path / "file").write_text("no folder")
        made = [ks.callbacks.ModelCheckpoint(tmp_path / name, "loss") for _ in models]
        for error in processes.run(lambda rank: checkpoints(made[rank], models[rank])):  # noqa: B023
            assert isinstance(error, kind), repr(error)


@same
def test_a_process_that_reaches_nobody_leaves_writing_to_the_chief(tmp_path, monkeypatch):
    from keras_shardopt.backends.active import processes

    for rank in (1, 0):
        monkeypatch.setattr(processes, "process", lambda: (2, rank))  # noqa: B023
        monkeypatch.setattr(processes, "gather_objects", lambda value: [value])
        ks.save_model(trained(), tmp_path / "model.keras")
        checkpoints(ks.callbacks.ModelCheckpoint(tmp_path / "best.keras", "loss"), trained())
        assert sorted(os.listdir(tmp_path)) == ([] if rank else ["best.keras", "model.keras"])


@same
def test_backups_of_state_in_parts(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, 3)
    models, _ = models_in_parts(processes)
    before = [values(model) for model in models]

    def work(rank, restore):
        backup = ks.callbacks.BackupAndRestore(tmp_path if rank == 0 else "/nowhere/at/all")
        backup.set_model(models[rank])
        backup.on_train_begin() if restore else backup.on_epoch_end(0)

    from keras_shardopt.backends.active import placement

    # Threads share the random numbers and have no collectives of a framework.
    monkeypatch.setattr(placement, "broadcast_state", lambda variables, optimizer_variables: None)
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
        assert isinstance(error, ValueError) and "optimizer state that is sharded" in str(error)


# -- the file itself -------------------------------------------------------------------------------------------------


@same
@both
def test_a_file_keeps_its_mode(tmp_path, name):
    SAVE[name](trained(), tmp_path / name)
    for mode in (0o600, 0o640, 0o664):
        os.chmod(tmp_path / name, mode)
        SAVE[name](trained(seed=2), tmp_path / name)
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == mode
    assert_same(values(loaded(tmp_path / name)), values(trained(seed=2)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@same
def test_a_file_keeps_its_owner(tmp_path, monkeypatch):
    path = tmp_path / "model.weights.h5"
    ks.save_weights(trained(), path)
    os.chown(path, 12345, 23456)
    os.chmod(path, 0o2640)
    ks.save_weights(trained(seed=2), path)
    found = os.stat(path)
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 23456, 0o2640)

    # Where it is not permitted, the group that it gets has no more than everybody had.
    def chown(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for before, after in ((0o660, 0o600), (0o664, 0o644), (0o640, 0o600), (0o604, 0o604)):
        os.chown(path, 12345, 23456)
        os.chmod(path, before)
        with monkeypatch.context() as patched:
            patched.setattr(os, "chown", chown)
            ks.save_weights(trained(), path)
        found = os.stat(path)
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 0, after)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
@same
def test_a_new_file_has_the_group_that_its_folder_hands_on(tmp_path):
    os.chown(tmp_path, -1, 23456)
    os.chmod(tmp_path, 0o2775)
    ks.save_weights(trained(), tmp_path / "ours.weights.h5")
    trained().save_weights(tmp_path / "their.weights.h5")
    found = [os.stat(tmp_path / name) for name in ("ours.weights.h5", "their.weights.h5")]
    assert [each.st_gid for each in found] == [23456] * 2
    assert found[0].st_mode == found[1].st_mode


@same
def test_nobody_else_reads_what_is_not_finished(tmp_path):
    unfinished = atomic.Unfinished(str(tmp_path / "model.keras"))
    assert stat.S_IMODE(os.stat(os.path.dirname(unfinished.path)).st_mode) == 0o700
    unfinished.discard()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be synchronised there")
def test_content_reaches_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    """The order in which a crash of the machine leaves the file before or the new one, each whole."""
    done = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor):
        found = os.fstat(descriptor)
        done.append(("sync", found.st_ino, found.st_size if stat.S_ISREG(found.st_mode) else "folder"))
        real_sync(descriptor)

    def replace(source, target):
        done.append(("name", os.stat(source).st_ino, os.path.basename(target)))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    folder = os.stat(tmp_path).st_ino
    path, previous = tmp_path / "model.keras", tmp_path / "previous.keras"
    before = None
    for number in range(2):
        unfinished = atomic.Unfinished(str(path))
        with open(unfinished.path, "wb") as file:
            file.write(b"x" * (number + 1))
        unfinished.finish(keep_as=str(previous) if number else None)
        new = os.stat(path).st_ino
        kept = [("name", before, "previous.keras")] if number else []
        assert done == [("sync", new, number + 1), *kept, ("name", new, "model.keras"), ("sync", folder, "folder")]
        done.clear()
        before = new
    assert (path.read_bytes(), previous.read_bytes()) == (b"xx", b"x")


# -- what is left behind ---------------------------------------------------------------------------------------------

# A process that begins to write a file, and shows the process number that it is told. It is in no hurry.
SAVING = """
import importlib.util, os, sys, time
os.getpid = lambda: int(sys.argv[3])
spec = importlib.util.spec_from_file_location("atomic", sys.argv[1])
atomic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic)
unfinished = atomic.Unfinished(sys.argv[2])
open(unfinished.path, "w").write("half")
print(os.path.basename(os.path.dirname(unfinished.path)), flush=True)
sys.stdin.read()
unfinished.finish()
"""


@contextlib.contextmanager
def saving_process(path, number):
    command = [sys.executable, "-S", "-c", SAVING, atomic.__file__, str(path), str(number)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@same
def test_a_save_under_way_stays_whatever_its_process_number(tmp_path):
    """As in another container, of which the process numbers are others: that one is this one's, or nobody's here."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    for number in (os.getpid(), ended.pid):
        with saving_process(tmp_path / "first.keras", number) as (process, scratch):
            ks.save_weights(trained(), tmp_path / "second.weights.h5")
            assert sorted(os.listdir(tmp_path)) == [scratch, "second.weights.h5"]
            process.communicate("go on")
            assert process.returncode == 0
        assert (tmp_path / "first.keras").read_text() == "half"
        (tmp_path / "first.keras").unlink()


@same
def test_what_a_killed_process_leaves_goes_at_once(tmp_path):
    with saving_process(tmp_path / "first.keras", os.getpid()) as (process, scratch):
        process.kill()
        process.wait()
        assert os.listdir(tmp_path) == [scratch]
        ks.save_weights(trained(), tmp_path / "second.weights.h5")
        assert os.listdir(tmp_path) == ["second.weights.h5"]


def grow_old(path):
    for each in (*path.iterdir(), path):
        os.utime(each, (0, 0))


@same
def test_where_a_lock_tells_nothing_age_does(tmp_path, monkeypatch):
    names = {
        f".keras_shardopt-{atomic._KERNEL}-0123abcd.unfinished": (True, False),  # without a lock
        ".keras_shardopt-elsewhere-0123abcd.unfinished": (True, False),  # on another machine
        ".keras_shardopt-host-4711-0123abcd.unfinished": (True, False),  # of an older version
        ".keras_shardopt-x.unfinished": (True, True),
        "something.unfinished": (True, True),
    }
    for i, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.keras").write_text("half")
        if i == 1:
            (tmp_path / name / ".lock").write_text("")  # which may be held there
    held = atomic.Unfinished(str(tmp_path / "held.keras"))  # by this very process
    for is_old in (False, True):
        if is_old:
            for name in [*names, os.path.basename(os.path.dirname(held.path))]:
                grow_old(tmp_path / name)
        atomic.Unfinished(str(tmp_path / "model.keras")).discard()
        stay = {name for name, stays in names.items() if stays[is_old]}
        assert set(os.listdir(tmp_path)) == stay | {os.path.basename(os.path.dirname(held.path))}
    held.discard()


@same
def test_where_no_locks_can_be_had(tmp_path, monkeypatch):
    """As on some network file systems."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    first = atomic.Unfinished(str(tmp_path / "first.keras"))
    pathlib.Path(first.path).write_text("half")
    ks.save_weights(trained(), tmp_path / "second.weights.h5")
    first.finish()
    assert sorted(os.listdir(tmp_path)) == ["first.keras", "second.weights.h5"]


@pytest.mark.neutral
def test_who_fails_to_write_a_file_of_its_own_leaves_no_part_of_it(monkeypatch, tmp_path):
    def half(path):
        pathlib.Path(path).write_text("half")
        raise OSError("no space")

    monkeypatch.setattr(saving.processes, "process", lambda: (2, 1))
    with pytest.raises(OSError, match="no space"):
        saving.save_from_any_process(trained(), half, tmp_path / "model.weights.h5")
    assert not list(tmp_path.iterdir())
