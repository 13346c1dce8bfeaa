"""Sharded checkpoints: one process, and several that are threads here."""

import contextlib
import errno
import json
import os
import pathlib
import random
import shutil
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
from conftest import BACKEND
from support import catalogue, launch, problem
from support.suites import some
from support.worlds import Processes

import keras_shardopt as ks
from keras_shardopt.backends import stored_parts
from keras_shardopt.backends.stored_parts import OwnParts, Part, even_parts
from keras_shardopt.callbacks import sharded_checkpoint
from keras_shardopt.checkpoint import __main__ as command
from keras_shardopt.checkpoint.sharded import pieces, saves, state

same = pytest.mark.exhaustive("jax", "tensorflow")  # the same Python on all backends


def trained(optimizer=None, seed=1):
    """A model with BatchNormalization and Dropout, filled with random values in place of training."""
    model = keras.Sequential(
        [
            keras.Input((problem.NUM_FEATURES,)),
            keras.layers.Dense(37, activation="tanh"),
            keras.layers.Dropout(0.3, seed=seed),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(problem.NUM_OUTPUTS),
        ]
    )
    model.compile(optimizer or ks.CrossShard(ks.LossScaling(keras.optimizers.Adam(0.01))), "mse")
    model.optimizer.build(model.trainable_variables)
    drawn = np.random.default_rng(seed)
    for variable in [*model.weights, *model.optimizer.variables]:
        if len(variable.shape) and "float" in variable.dtype:
            variable.assign(drawn.uniform(0.1, 1, size=variable.shape).astype("float32"))
    model.optimizer.iterations.assign(seed)
    return model


def values(model):
    found = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    return [np.array(value) for value in [*found, *catalogue.state_of(model.optimizer)]]


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for one, other in zip(some, others):
        np.testing.assert_array_equal(one, other)


# -- files -----------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "vars/0": RANDOM.normal(size=(7, 5, 3)).astype("float32"),
    "scalar": np.array(3, "int32"),
    "empty": np.zeros((0, 3), "float32"),
    "row": RANDOM.normal(size=(1, 90)).astype("float64"),
    "bool": RANDOM.normal(size=(19,)) > 0,
    "seed": np.array([1, 2**32 - 1], "uint32"),
    "bfloat16": RANDOM.normal(size=(11, 2)).astype(ml_dtypes.bfloat16),
    "float8": RANDOM.normal(size=(4, 6)).astype(ml_dtypes.float8_e4m3fn),
}
BOX = RANDOM.normal(size=(8, 6)).astype("float32")


def written(folder, num_processes=3, values=ARRAYS, **changes):
    for index in range(num_processes):
        process = (num_processes, index)
        sources = {path: pieces.Source(even_parts(array, process), {}) for path, array in values.items()}
        columns = slice(2 * index, 2 * index + 2)
        parts = [Part((0, 2 * index), BOX[:, columns])]
        sources["box"] = pieces.Source(OwnParts(BOX.shape, "float32", parts, is_flat=False), {})
        pieces.write_process(str(folder), index, {**sources, **changes}, {})
    pieces.write_manifest(str(folder), num_processes, {"step": 1})
    return pieces.Checkpoint(str(folder))


@pytest.mark.neutral
@pytest.mark.parametrize("piece_bytes", [2**24, 100, 7])
def test_arrays_of_every_dtype_come_back(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    checkpoint = written(tmp_path)
    checkpoint.verify()
    assert set(checkpoint) == {*ARRAYS, "box"}
    for path, array in {**ARRAYS, "box": BOX}.items():
        stored = checkpoint[path]
        found = np.asarray(stored)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), path
        for start in range(array.size):
            stop = (start + array.size + 1) // 2
            assert stored.flat_range(start, stop).tobytes() == array.reshape(-1)[start:stop].tobytes(), path
    np.testing.assert_array_equal(checkpoint["box"][1:5, 2:5], BOX[1:5, 2:5])
    np.testing.assert_array_equal(checkpoint["vars/0"][2:6, :, 1:2], ARRAYS["vars/0"][2:6, :, 1:2])


@pytest.mark.neutral
def test_a_reader_reads_the_pieces_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 16)
    checkpoint = written(tmp_path)
    read, real = [], checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda piece: read.append(piece) or real(piece))
    checkpoint["vars/0"].flat_range(0, 4)
    assert len(read) == 1
    checkpoint["box"][0:1]
    assert len(read) == 1 + 3  # of each process the first rows


@pytest.mark.neutral
def test_each_process_writes_its_share():
    for size in (1000, 1001, 7, 3, 2, 1, 0):
        shares = [even_parts(np.zeros(size), (3, index)).parts for index in range(3)]
        sizes = [sum(part.values.size for part in parts) for parts in shares]
        assert sum(sizes) == size and (size < 3 or max(sizes) - min(sizes) <= 1)


@pytest.mark.neutral
def test_pieces_that_overlap_or_are_missing_are_an_error(tmp_path):
    def box(start, shape):
        parts = [Part(start, np.zeros(shape, "float32"))]
        return pieces.Source(OwnParts((4, 4), "float32", parts, is_flat=False), {})

    for source, num in ((box((0, 0), (4, 3)), 12), (box((0, 0), (0, 0)), 0)):
        with pytest.raises(ValueError, match=f"each of its 16 elements once. Received: pieces with {num} elements"):
            written(tmp_path, 1, box=source)
    for heights in ({0: 2, 1: 2}, {0: 3, 2: 1}):  # of the parts, by their first row: as many elements as the box
        parts = [Part((row, 0), np.zeros((height, 4), "float32")) for row, height in heights.items()]
        overlapping = OwnParts((4, 4), "float32", parts, is_flat=False)
        with pytest.raises(ValueError, match="each of its 16 elements once. Received: overlapping pieces with 16"):
            written(tmp_path, 1, box=pieces.Source(overlapping, {}))
    with pytest.raises(ValueError, match="The shape of the array `box` is unknown"):
        written(tmp_path, 1, box=pieces.Source(OwnParts(None, "float32", []), {}))


@pytest.mark.neutral
@pytest.mark.parametrize("rounds", [60, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_no_damage_is_silent(tmp_path, rounds):
    (tmp_path / "intact").mkdir()
    written(tmp_path / "intact")
    (tmp_path / "other").mkdir()  # a save of other values, in files of the same sizes
    written(tmp_path / "other", values=ARRAYS | {"vars/0": -ARRAYS["vars/0"]})
    drawn = random.Random(rounds)
    silent = []
    for number in range(rounds):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "intact", folder)
        path = drawn.choice(sorted(folder.iterdir()))
        content = bytearray(path.read_bytes())
        kind = drawn.choice(["flip", "truncate", "delete", "extend", "swap", "foreign"])
        if kind == "flip":
            content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        elif kind == "truncate":
            del content[drawn.randrange(len(content)) :]
        elif kind == "extend":
            content += b"\0"
        elif kind == "swap":
            content = (tmp_path / "other" / path.name).read_bytes()
        elif kind == "foreign":
            content = drawn.randbytes(len(content))
        path.write_bytes(content)
        if kind == "delete":
            path.unlink()
        try:
            checkpoint = pieces.Checkpoint(str(folder))
            checkpoint.verify()
            for name, array in {**ARRAYS, "box": BOX}.items():
                assert np.asarray(checkpoint[name]).tobytes() == array.tobytes()
            silent.append((kind, path.name))
        except (OSError, ValueError):
            pass
        shutil.rmtree(folder)
    # JSON may have other spaces and mean the same.
    assert [each for each in silent if each != ("extend", "manifest.json")] == []


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_model_and_its_optimizer_come_back(tmp_path):
    saved = trained()
    path = ks.save_sharded(saved, tmp_path / "checkpoints")
    assert sorted(os.listdir(path)) == ["manifest.json", "rank-00000.safetensors"]
    for given in (path, tmp_path / "checkpoints"):
        model = trained(seed=2)
        assert ks.load_sharded(model, given) == (1, 0)
        assert_same(values(model), values(saved))


@pytest.mark.parametrize(
    ("stored", "reader"),
    [
        (lambda: ks.CrossShard(keras.optimizers.Adam(0.01)), lambda: keras.optimizers.Adam(0.01)),
        (lambda: keras.optimizers.Adam(0.01), lambda: ks.CrossShard(ks.LossScaling(keras.optimizers.Adam(0.01)))),
    ],
    ids=["into a plain optimizer", "from one"],
)
def test_checkpoints_move_between_wrapped_and_plain_optimizers(tmp_path, stored, reader):
    saved, model = trained(stored()), trained(reader(), seed=2)
    ks.save_sharded(saved, tmp_path)
    ks.load_sharded(model, tmp_path)
    inner = [[keras.ops.convert_to_numpy(v) for v in m.optimizer.variables][:8] for m in (saved, model)]
    assert_same(*inner)


def test_a_model_without_an_optimizer_gets_the_weights(tmp_path):
    saved = trained()
    ks.save_sharded(saved, tmp_path)
    model = keras.models.clone_model(saved)
    ks.load_sharded(model, tmp_path)
    assert_same(model.get_weights(), saved.get_weights())


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    ks.save_sharded(trained(), tmp_path)
    other = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), keras.layers.Dense(5)])
    other.compile(ks.CrossShard("adam"), "mse")
    other_kind = trained(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9)))
    for model, words in ((other, r"`layers/dense/vars/0` of shape \(\d, 37\)"), (other_kind, "state of Adam")):
        model.optimizer.build(model.trainable_variables)
        before = values(model)
        with pytest.raises(ValueError, match="must be of the same model and optimizer") as error:
            ks.load_sharded(model, tmp_path)
        error.match(words)
        assert_same(values(model), before)


@same
def test_the_same_layers_in_another_order_change_nothing(tmp_path):
    def named(*names):
        layers = [keras.layers.Dense(problem.NUM_FEATURES, name=name) for name in names]
        model = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers])
        model.compile(ks.CrossShard("adam"), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    ks.save_sharded(named("first", "second"), tmp_path)
    model = named("second", "first")
    before = values(model)
    with pytest.raises(ValueError, match="`first/kernel momentum`, but this optimizer has `second/kernel momentum`"):
        ks.load_sharded(model, tmp_path)
    assert_same(values(model), before)


@same
@pytest.mark.parametrize("optimizer", ["adam", lambda: ks.CrossShard("adam")], ids=["plain", "wrapped"])
def test_an_optimizer_that_was_not_built_comes_back(tmp_path, optimizer):
    def new():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), "mse")
        return model

    saved = new()
    ks.save_sharded(saved, tmp_path)
    model = new()
    assert ks.load_sharded(model, tmp_path) == (0, 0)
    assert_same(model.get_weights(), saved.get_weights())
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)


@same
def test_an_optimizer_that_was_not_built_does_not_fit_a_built_one(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(ks.CrossShard("adam"), "mse")
    ks.save_sharded(model, tmp_path)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="The Adam was saved before it was built"):
        ks.load_sharded(model, tmp_path)
    ks.save_sharded(model, tmp_path / "built")
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    other.compile(ks.CrossShard("adam"), "mse")
    ks.load_sharded(other, tmp_path / "built")
    assert other.optimizer.built


@same
def test_a_damaged_checkpoint_is_left_out_with_a_warning(tmp_path):
    first, second = trained(seed=1), trained(seed=2)
    ks.save_sharded(first, tmp_path)
    newest = pathlib.Path(ks.save_sharded(second, tmp_path))
    file = newest / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    model = trained(seed=3)
    with pytest.raises(OSError, match="is damaged"):
        ks.load_sharded(model, newest)
    assert_same(values(model), values(trained(seed=3)))
    with pytest.warns(UserWarning, match="A damaged checkpoint is skipped"):
        ks.load_sharded(model, tmp_path)
    assert_same(values(model), values(first))


@same
def test_arguments_are_checked(tmp_path):
    model = trained()
    with pytest.raises(TypeError, match="`model` must be a `keras.Model`"):
        ks.save_sharded("model", tmp_path)
    with pytest.raises(TypeError, match="`directory` must be a path"):
        ks.save_sharded(model, 3)
    with pytest.raises(ValueError, match="`path` must be the path of a local file or directory"):
        ks.load_sharded(model, "gs://bucket")
    with pytest.raises(ValueError, match="must be built"):
        ks.save_sharded(keras.Sequential([keras.layers.Dense(1)]), tmp_path)
    with pytest.raises(FileNotFoundError, match="must have a complete sharded checkpoint"):
        ks.load_sharded(model, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        ks.save_sharded(model, tmp_path / "file")
    with pytest.raises(ValueError, match="`save_freq` must be"):
        ks.callbacks.ShardedCheckpoint(tmp_path, save_freq="batch")
    with pytest.raises(ValueError, match="`keep` must be at least 1"):
        ks.callbacks.ShardedCheckpoint(tmp_path, keep=0)


# -- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.backends("torch", "tensorflow")  # JAX asks the devices; see test_several_processes_jax.py
@pytest.mark.exhaustive("tensorflow")
def test_several_processes_write_one_checkpoint(tmp_path, monkeypatch):
    models = [trained() for _ in range(3)]
    whole = values(models[0])
    processes = Processes(monkeypatch, 3)
    paths = processes.run(lambda rank: ks.save_sharded(models[rank], tmp_path))
    assert len(set(paths)) == 1
    assert sorted(os.listdir(paths[0])) == ["manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(3))]
    sizes = [os.path.getsize(os.path.join(paths[0], f"rank-{rank:05d}.safetensors")) for rank in range(3)]
    assert max(sizes) < 0.5 * sum(sizes)
    others = [trained(seed=2) for _ in range(2)]
    assert Processes(monkeypatch, 2).run(lambda rank: ks.load_sharded(others[rank], tmp_path)) == [(1, 0)] * 2
    for model in others:
        assert_same(values(model), whole)


@same
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_process_cannot_write_is_an_error_on_all(tmp_path, monkeypatch, failing):
    models = [trained() for _ in range(2)]
    real = pieces.write_process

    def write(folder, index, *arguments):
        if index == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, index, *arguments)

    monkeypatch.setattr(saves, "write_process", write)
    errors = Processes(monkeypatch, 2).run(lambda rank: ks.save_sharded(models[rank], tmp_path))
    assert [type(error) for error in errors] == [OSError, OSError]
    assert all("No space left on device" in str(error) for error in errors)
    assert os.listdir(tmp_path) == []


@same
def test_a_directory_that_a_process_does_not_see_is_an_error_on_all(tmp_path, monkeypatch):
    models = [trained() for _ in range(2)]
    monkeypatch.setattr(saves.time, "sleep", lambda _: None)
    errors = Processes(monkeypatch, 2).run(lambda rank: ks.save_sharded(models[rank], tmp_path / str(rank)))
    assert all("process 1 cannot find" in str(error) for error in errors), errors
    assert os.listdir(tmp_path / "0") == []


@pytest.mark.backends("torch", "tensorflow")  # on JAX, all processes hold one array
def test_statistics_of_one_process_are_not_mixed_with_those_of_another(tmp_path, monkeypatch):
    models = [trained(seed=1), trained(seed=2)]
    for model in models[1:]:  # trained on other rows: only statistics differ
        for one, other in zip(model.trainable_variables, models[0].trainable_variables):
            one.assign(other)
    Processes(monkeypatch, 2).run(lambda rank: ks.save_sharded(models[rank], tmp_path))
    model = trained(seed=3)
    Processes(monkeypatch, 1).run(lambda rank: ks.load_sharded(model, tmp_path))
    assert_same(model.get_weights(), models[0].get_weights())


@same
def test_an_error_of_one_process_while_loading_is_an_error_on_all(tmp_path, monkeypatch):
    ks.save_sharded(trained(), tmp_path)
    models, real = [trained() for _ in range(2)], state.saving_lib._load_state

    def load(model, *arguments, **options):
        if model is models[1]:
            raise OSError("stale file handle")
        return real(model, *arguments, **options)

    monkeypatch.setattr(state.saving_lib, "_load_state", load)
    errors = Processes(monkeypatch, 2, patience=5.0).run(lambda rank: ks.load_sharded(models[rank], tmp_path))
    assert [(type(error), str(error)) for error in errors] == [(OSError, "stale file handle")] * 2


@same
def test_a_directory_that_process_0_cannot_read_is_an_error_on_all(tmp_path, monkeypatch):
    def failing(directory):
        raise PermissionError(errno.EACCES, "Permission denied", directory)

    monkeypatch.setattr(sharded_checkpoint, "complete_saves", failing)
    saves_of = [ks.callbacks.ShardedCheckpoint(tmp_path) for _ in range(2)]
    for save in saves_of:
        save.set_model(trained())
    errors = Processes(monkeypatch, 2, patience=5.0).run(lambda rank: saves_of[rank].on_train_begin())
    assert all("Permission denied" in str(error) for error in errors), errors


# -- callbacks -------------------------------------------------------------------------------------------------------


def fitted(model, *callbacks, **arguments):
    x, y = problem.data(num_steps=3)
    return model.fit(x, y, batch_size=problem.BATCH_SIZE, callbacks=list(callbacks), verbose=0, **arguments)


@pytest.mark.parametrize("background", some([True, False], [True], "jax"))
@pytest.mark.exhaustive("tensorflow")
def test_the_callback_keeps_the_newest(tmp_path, background):
    model = trained()
    fitted(model, ks.callbacks.ShardedCheckpoint(tmp_path, keep=2, background=background), epochs=4)
    assert [pieces.Checkpoint(folder).manifest["epoch"] for folder in saves.complete_saves(str(tmp_path))] == [3, 4]
    again = trained(seed=2)
    assert ks.load_sharded(again, tmp_path) == (1 + 12, 4)
    assert_same(values(again), values(model))


@same
def test_the_newest_checkpoint_is_the_one_saved_last(tmp_path):
    for step in (7, 3, 3):
        model = trained()
        model.optimizer.iterations.assign(step)
        model.layers[0].bias.assign(model.layers[0].bias + step)
        ks.save_sharded(model, tmp_path)
    for folder in reversed(saves.complete_saves(str(tmp_path))):
        os.utime(folder, (0, 0))  # clocks do not matter
        os.utime(os.path.join(folder, "manifest.json"), (len(folder), len(folder)))
    again = trained(seed=2)
    assert ks.load_sharded(again, tmp_path).step == 3
    assert_same(values(again), values(model))


@same
def test_a_new_run_in_the_directory_of_an_old_one_keeps_both_with_a_warning(tmp_path):
    fitted(trained(), ks.callbacks.ShardedCheckpoint(tmp_path, keep=1), epochs=3)
    (old,) = saves.complete_saves(str(tmp_path))
    model = trained()
    with pytest.warns(UserWarning, match="Call `load_sharded` before `fit` to resume"):
        fitted(model, ks.callbacks.ShardedCheckpoint(tmp_path, keep=1), epochs=2)
    assert [saves.step_of(folder) for folder in saves.complete_saves(str(tmp_path))] == [1 + 9, 1 + 6]
    assert saves.complete_saves(str(tmp_path))[0] == old
    again = trained(seed=2)
    assert ks.load_sharded(again, tmp_path) == (1 + 6, 2)
    assert_same(values(again), values(model))
    fitted(again, ks.callbacks.ShardedCheckpoint(tmp_path / "other", keep=1), epochs=1)  # no warning


@same
def test_a_save_waits_for_the_end_of_a_window_of_micro_batches(tmp_path):
    def model(k):
        return trained(ks.CrossShard(keras.optimizers.SGD(0.1), gradient_accumulation_steps=k))

    fitted(model(2), ks.callbacks.ShardedCheckpoint(tmp_path / "2", save_freq=3, keep=None), epochs=4)
    steps = [saves.step_of(folder) for folder in saves.complete_saves(str(tmp_path / "2"))]
    assert steps == [1 + 2, 1 + 4, 1 + 6]  # after 4, 8 and 12 batches
    inside = model(2)
    with pytest.warns(UserWarning, match="does not store gradients that are accumulated for the next update"):
        fitted(inside, ks.callbacks.ShardedCheckpoint(tmp_path / "epoch"), epochs=1)
    assert ks.load_sharded(inside, tmp_path / "epoch").step == 1 + 1
    ks.save_sharded(inside, tmp_path / "epoch")  # loading has discarded the window, so there is no warning


@same
def test_saving_changes_no_bit_of_training_and_needs_no_epoch(tmp_path):
    alone, saving = trained(), trained()
    keras.utils.set_random_seed(1)
    fitted(alone, epochs=2)
    keras.utils.set_random_seed(1)
    fitted(saving, ks.callbacks.ShardedCheckpoint(tmp_path, save_freq=2, keep=None), epochs=2)
    assert_same(values(saving), values(alone))
    steps = [pieces.Checkpoint(folder).manifest["step"] for folder in saves.complete_saves(str(tmp_path))]
    assert steps == [1 + 2, 1 + 4, 1 + 6]


@same
def test_an_error_in_the_background_ends_training(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saves, "write_process", write)
    with pytest.raises(OSError, match="No space left"):
        fitted(trained(), ks.callbacks.ShardedCheckpoint(tmp_path, save_freq=1), epochs=50)
    assert os.listdir(tmp_path) == []


@same
def test_a_file_that_does_not_fit_is_an_os_error(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of files exist on Unix only")
    model, path = trained(), ks.save_sharded(trained(seed=2), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"rank-00000.safetensors.*cannot be written"):
            ks.save_sharded(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == [os.path.basename(path)]
    assert ks.load_sharded(model, tmp_path).step == 2


@same
def test_a_save_of_an_interrupted_fit_is_kept(tmp_path):
    model, save = trained(), ks.callbacks.ShardedCheckpoint(tmp_path, keep=1)
    with pytest.raises(InterruptedError):
        fitted(model, save, Interrupting(), epochs=3)
    save._save._thread.join()
    newest = saves.complete_saves(str(tmp_path))[-1]
    found = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: found.append(saves.complete_saves(str(tmp_path)))
    )
    fitted(model, save, seen, epochs=1)
    assert newest in found[0]


@same
def test_a_save_whose_files_are_renamed_now_is_not_deleted(tmp_path, monkeypatch):
    unfinished = tmp_path / "000001-step-1-0123abcd"
    unfinished.mkdir()
    (unfinished / "rank-00000.safetensors.unfinished").write_text("")
    real = os.scandir

    def scandir(path):
        monkeypatch.setattr(os, "scandir", real)
        found = list(real(path))
        for entry in found:
            os.rename(entry.path, entry.path.removesuffix(".unfinished"))
        return iter(found)

    monkeypatch.setattr(os, "scandir", scandir)
    saves.delete_abandoned(str(tmp_path))
    assert unfinished.exists()


@same
def test_only_old_unfinished_saves_are_deleted(tmp_path, monkeypatch):
    unfinished = tmp_path / "000001-step-1-0123abcd"
    unfinished.mkdir()
    saves.delete_abandoned(str(tmp_path))
    assert unfinished.exists()
    monkeypatch.setattr(saves, "ABANDONED_SECONDS", -1.0)
    saves.delete_abandoned(str(tmp_path))
    assert os.listdir(tmp_path) == []


class Interrupting(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@pytest.mark.exhaustive("tensorflow")
def test_a_sharded_backup_ends_as_if_training_was_not_interrupted(tmp_path):
    arguments = {"epochs": 4, "shuffle": keras.backend.backend() != "tensorflow"}

    def run(folder, *more):
        keras.utils.set_random_seed(3)
        model = trained()
        with contextlib.suppress(InterruptedError):
            fitted(model, ks.callbacks.BackupAndRestore(tmp_path / folder, sharded=True), *more, **arguments)
        return model

    alone = values(run("alone"))
    run("backup", Interrupting())
    assert [pieces.Checkpoint(f).manifest["epoch"] for f in saves.complete_saves(str(tmp_path / "backup"))] == [2]
    assert_same(values(run("backup")), alone)
    assert os.listdir(tmp_path) == []  # trained to the end


# -- one file --------------------------------------------------------------------------------------------------------


def test_a_consolidated_file_is_one_of_plain_keras(tmp_path):
    model = trained()
    ks.save_sharded(model, tmp_path / "checkpoints")
    ks.save_weights(model, tmp_path / "saved.weights.h5")
    ks.consolidate(tmp_path / "checkpoints", tmp_path / "one.weights.h5")
    ks.consolidate(tmp_path / "checkpoints", tmp_path / "one.keras")
    for name in ("saved.weights.h5", "one.weights.h5"):
        again = trained(seed=2)
        again.load_weights(tmp_path / name)
        assert_same(again.get_weights(), model.get_weights())
        assert_same(catalogue.state_of(again.optimizer), catalogue.state_of(model.optimizer))
    loaded = keras.saving.load_model(tmp_path / "one.keras")
    assert type(loaded.optimizer) is ks.LossScaling
    assert_same(loaded.get_weights(), model.get_weights())
    with pytest.raises(ValueError, match=r"must end in '.keras' or '.weights.h5'"):
        ks.consolidate(tmp_path / "checkpoints", tmp_path / "one.npz")


class Words(keras.layers.Layer):
    """Keeps a file, as lookup layers keep their vocabulary."""

    words = None

    def call(self, inputs):
        return inputs

    def save_assets(self, folder):
        (pathlib.Path(folder) / "words.txt").write_text("some words")

    def load_assets(self, folder):
        self.words = (pathlib.Path(folder) / "words.txt").read_text()


@same
def test_files_of_layers_are_in_the_consolidated_file(tmp_path):
    ks.save_sharded(keras.Sequential([keras.Input((1,)), Words()]), tmp_path)
    ks.consolidate(tmp_path, tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Words": Words})
    assert loaded.layers[0].words == "some words"


@same
def test_backups_of_the_other_kind_are_an_error(tmp_path):
    for sharded in (False, True):
        folder = tmp_path / str(sharded)
        fitted(trained(), ks.callbacks.BackupAndRestore(folder, sharded=sharded, delete_checkpoint=False))
        with pytest.raises(ValueError, match=f"Pass `sharded={sharded}`"):
            fitted(trained(), ks.callbacks.BackupAndRestore(folder, sharded=not sharded))
        assert len(os.listdir(folder)) == 1


@same
def test_plain_keras_reads_a_consolidated_file_without_this_package(tmp_path):
    model = trained(ks.CrossShard(keras.optimizers.Adam(0.01)))
    ks.save_sharded(model, tmp_path)
    ks.consolidate(tmp_path, tmp_path / "model.keras")
    program = (
        "import keras, sys; model = keras.saving.load_model(sys.argv[1]); print(type(model.optimizer).__name__, "
        "int(model.optimizer.iterations), 'keras_shardopt' in sys.modules)"
    )
    printed = launch.program(BACKEND, program, tmp_path / "model.keras", environment=launch.variables(BACKEND))
    assert printed.splitlines()[-1].split() == ["Adam", "1", "False"]


@same
def test_the_command_lists_verifies_and_consolidates(tmp_path, capsys):
    model = trained()
    path = pathlib.Path(ks.save_sharded(model, tmp_path))
    assert command.main(["list", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (tmp_path / "000007-step-1-0123abcd").mkdir()
    assert command.main(["list", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert f"{path}  step 1  epoch 0" in first and first.endswith("1 process") and first == line
    assert "incomplete" in second
    assert command.main(["list", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [first]
    (tmp_path / "empty").mkdir()
    assert command.main(["list", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out.startswith("no checkpoints in")
    assert command.main(["verify", str(tmp_path)]) == 0
    assert command.main(["consolidate", str(tmp_path), str(tmp_path / "model.keras")]) == 0
    assert (tmp_path / "model.keras").exists()
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert command.main(["verify", str(tmp_path)]) == 1
    assert "is damaged" in capsys.readouterr().out
    file.write_bytes(content[:-1])
    assert command.main(["consolidate", str(tmp_path), str(tmp_path / "model.keras")]) == 1
    assert "error: " in capsys.readouterr().err
    assert command.main(["list", str(tmp_path / "nowhere")]) == 1


@same
def test_a_newer_format_is_an_error(tmp_path):
    path = pathlib.Path(ks.save_sharded(trained(), tmp_path)) / "manifest.json"
    manifest = {**json.loads(path.read_text())["manifest"], "format": 2}
    pieces.write_json(str(path), {"hash": pieces._hash_of_json(manifest), "manifest": manifest})
    with pytest.raises(ValueError, match="reads checkpoints of format 1"):
        ks.load_sharded(trained(), tmp_path)


@same
def test_without_safetensors_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        ks.callbacks.ShardedCheckpoint(tmp_path)


@pytest.mark.exhaustive("tensorflow")
def test_saves_of_a_fit_share_host_memory(tmp_path):
    """Copies to new memory take several times longer."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                checkpoint._check(wait=True)
                buffers = [each for arrays in stored_parts._buffers.values() for each in arrays]
                seen.append({each.ctypes.data for each in buffers if each.size > 37})

    checkpoint = ks.callbacks.ShardedCheckpoint(tmp_path, keep=None)
    model = trained()
    weights = []
    each = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=3, verbose=0, callbacks=[checkpoint, Watch(), each])
    assert len(seen) == 2 and not stored_parts._buffers
    large = sum(v.shape is not None and np.prod(v.shape) > 37 for v in model.variables)
    assert seen[0] == seen[1] and len(seen[0]) >= large
    for folder, saved in zip(saves.complete_saves(str(tmp_path)), weights, strict=True):
        ks.load_sharded(model, folder)
        for one, other in zip(model.get_weights(), saved, strict=True):
            np.testing.assert_array_equal(one, other)
