"""BackupAndRestore where one process holds all replicas.

Ranks are in test_restart_ranks.py, processes in test_several_processes_jax.py.
"""

import contextlib
import os
import random
import warnings

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import restarting, same_bits
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.models import buffers_of

EPOCHS = 4
STEPS = 3

# The same Python on all backends; what each must get right is that training goes on as if nothing had happened.
of_files = pytest.mark.exhaustive("jax", "tensorflow")


class Noise(keras.layers.Layer):
    """Noise from Keras' global seed."""

    def call(self, inputs):
        return inputs + 0.01 * keras.random.normal(keras.ops.shape(inputs))


class Interrupting(keras.callbacks.Callback):
    """Ends training by an error in the middle of the third epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == 2 * STEPS + 2:
            raise InterruptedError


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """All variables after training that nobody interrupts."""
    variables, epochs = trained(tmp_path_factory.mktemp("alone"))
    assert epochs == EPOCHS
    return variables


def trained(folder, interrupted=False, prepared=False, callback=None, noise=False, **arguments):
    """All variables after training in `folder`, as a program that was just started would train."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(restarting.layers(*([Noise()] if noise else [])))
    model.compile(ks.CrossShard(restarting.adam()), "mse")
    if prepared:
        ks.prepare(model)
    backup = callback or ks.callbacks.BackupAndRestore(folder, **arguments)
    callbacks = [backup, *([Interrupting()] if interrupted else [])]
    x, y = problem.data(STEPS)
    shuffle = BACKEND != "tensorflow" and not prepared
    try:
        history = model.fit(
            x, y, batch_size=problem.BATCH_SIZE, epochs=EPOCHS, callbacks=callbacks, shuffle=shuffle, verbose=0
        )
        assert not interrupted
        epochs = len(history.epoch)
    except InterruptedError:
        epochs = None
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in variables], epochs


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others):
        np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive("jax", "tensorflow")
def test_what_was_interrupted_ends_as_if_it_was_not(tmp_path, alone):
    trained(tmp_path / "backup", interrupted=True)
    assert os.listdir(tmp_path / "backup") == ["backup.npz"]
    resumed, epochs = trained(tmp_path / "backup")
    assert epochs == EPOCHS - 2
    assert_same(resumed, alone)
    assert not (tmp_path / "backup").exists()  # trained to the end


@pytest.mark.backends("torch")  # elsewhere it is drawn while a step is traced, and becomes a constant
def test_the_global_seed_goes_on_too(tmp_path):
    alone, _ = trained(tmp_path / "alone", noise=True)
    trained(tmp_path / "backup", interrupted=True, noise=True)
    keras.utils.clear_session(free_memory=False)
    assert_same(trained(tmp_path / "backup", noise=True)[0], alone)


class Draws(keras.callbacks.Callback):
    """Draws global random numbers in each epoch, unless it ends training by an error there."""

    def __init__(self, last=None):
        super().__init__()
        self.last, self.found = last, {}

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.last:
            raise InterruptedError
        self.found[epoch] = random.random(), np.random.rand()


@pytest.mark.neutral
def test_global_random_numbers_go_on_too(tmp_path):
    def drawn(folder, last=None):
        keras.utils.set_random_seed(3)
        model = problem.model()
        model.compile(ks.CrossShard("sgd"), "mse")
        draws = Draws(last)
        backup = ks.callbacks.BackupAndRestore(tmp_path / folder)
        with contextlib.nullcontext() if last is None else pytest.raises(InterruptedError):
            model.fit(*problem.data(1), epochs=4, callbacks=[backup, draws], verbose=0)
        return draws.found

    alone = drawn("alone")
    assert len(set(alone.values())) == 4
    assert drawn("interrupted", last=2) | drawn("interrupted") == alone


@pytest.mark.backends("torch")
def test_buffers_of_modules_go_to_all_ranks(tmp_path, monkeypatch):
    def backed_up(**arguments):
        model = same_bits.model_of("wrapped-SGD-plain", virtual_replicas=None)
        same_bits.fit(model, "wrapped-SGD-plain", callbacks=[ks.callbacks.BackupAndRestore(tmp_path, **arguments)])
        return model

    backed_up(delete_checkpoint=False)
    sent = []
    monkeypatch.setattr(placement, "broadcast_state", lambda variables, *_: sent.extend(variables))
    model = backed_up()
    buffers = buffers_of(model)
    assert len(buffers) > 3 and {id(buffer) for buffer in buffers} <= {id(variable) for variable in sent}


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.exhaustive("tensorflow")
def test_on_several_replicas(tmp_path):
    with ks.data_parallel(2) as replicas:
        alone, _ = trained(tmp_path / "alone", prepared=True)
    with ks.data_parallel(2) as replicas:
        trained(tmp_path / "backup", interrupted=True, prepared=True)
    with ks.data_parallel(2) as replicas:
        resumed, epochs = trained(tmp_path / "backup", prepared=True)
    replicas.close()
    assert epochs == EPOCHS - 2
    weights = slice(0, None) if BACKEND == "jax" else slice(0, 2)  # each replica has statistics of its own
    assert_same(resumed[weights], alone[weights])


@of_files
def test_a_crash_while_writing_leaves_the_backup_before(tmp_path, monkeypatch, alone):
    trained(tmp_path, interrupted=True)
    before = (tmp_path / "backup.npz").read_bytes()

    def write_array(file, array, **arguments):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(np.lib.format, "write_array", write_array)
    with pytest.raises(OSError, match="^disk full$"):
        trained(tmp_path)
    assert (tmp_path / "backup.npz").read_bytes() == before
    monkeypatch.undo()
    assert_same(trained(tmp_path)[0], alone)


@of_files
def test_a_damaged_backup_falls_back_on_the_one_before(tmp_path, alone):
    trained(tmp_path, interrupted=True, double_checkpoint=True)
    whole = (tmp_path / "backup.npz").read_bytes()
    (tmp_path / "backup.npz").write_bytes(whole[: len(whole) // 2])
    resumed, epochs = trained(tmp_path, double_checkpoint=True, delete_checkpoint=False)
    assert epochs == EPOCHS - 1
    assert_same(resumed, alone)
    assert sorted(os.listdir(tmp_path)) == ["backup.npz", "previous.npz"]


@of_files
def test_the_newest_backup_is_read_first(tmp_path, alone):
    trained(tmp_path, interrupted=True, double_checkpoint=True)
    assert sorted(os.listdir(tmp_path)) == ["backup.npz", "previous.npz"]
    resumed, epochs = trained(tmp_path, double_checkpoint=True)
    assert epochs == EPOCHS - 2  # of the older one it would be one more, with the same end
    assert_same(resumed, alone)


def test_a_damaged_backup_without_another_is_an_error(tmp_path):
    (tmp_path / "backup.npz").write_bytes(b"PK")
    with pytest.raises(OSError, match="cannot be read"):
        trained(tmp_path)


@of_files
def test_a_backup_of_another_model_is_refused(tmp_path):
    trained(tmp_path, interrupted=True)
    model = problem.model()
    model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(ValueError, match="`backup_dir` must hold a backup of the same model"):
        model.fit(*problem.data(1), callbacks=[ks.callbacks.BackupAndRestore(tmp_path)], verbose=0)
    assert_same(model.get_weights(), before)


def test_a_backup_of_another_optimizer_is_refused(tmp_path):
    """Of the same shapes, which alone would tell nothing."""

    def backup_of(optimizer):
        model = problem.model()
        model.compile(ks.CrossShard(optimizer), "mse")
        model.optimizer.build(model.trainable_variables)
        backup = ks.callbacks.BackupAndRestore(tmp_path)
        backup.set_model(model)
        return backup

    backup_of(problem.sgd_momentum()).on_epoch_end(0)
    backup_of(problem.sgd_momentum()).on_train_begin()
    with pytest.raises(ValueError, match="with state of SGD, but the model has Lion"):
        backup_of(keras.optimizers.Lion()).on_train_begin()


def test_errors_keep_their_class_and_say_it_once():
    from keras_shardopt.checkpoint import backup

    for error in (OSError("full"), OSError(), PermissionError("no"), ValueError()):
        assert backup._sendable(error) is error
    assert [str(backup._sendable(error)) for error in (EOFError(), KeyError("x"))] == ["EOFError", "KeyError: 'x'"]


def test_an_unbuilt_model_is_refused(tmp_path):
    backup = ks.callbacks.BackupAndRestore(tmp_path)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup.set_model(model)
    with pytest.raises(ValueError, match="must be built"):
        backup.on_train_begin()


def test_half_precision_weights_keep_every_bit(tmp_path):
    keras.config.set_dtype_policy("bfloat16")
    model = problem.model()
    keras.config.set_dtype_policy("float32")
    model.compile(ks.CrossShard("sgd"), "mse")
    backup = ks.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(*problem.data(1), batch_size=8, epochs=1, callbacks=[backup], verbose=0)
    before = [
        keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.convert_to_tensor(v), "float32")) for v in model.weights
    ]
    for variable in model.weights:
        variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
    backup.on_train_begin()
    assert_same(
        [keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.convert_to_tensor(v), "float32")) for v in model.weights],
        before,
    )


def test_training_on_after_the_end_begins_with_epoch_0(tmp_path):
    model = problem.model()
    model.compile(ks.CrossShard("sgd"), "mse")
    backup = ks.callbacks.BackupAndRestore(tmp_path / "new" / "folder")
    for _ in range(2):
        history = model.fit(*problem.data(1), epochs=2, callbacks=[backup], verbose=0)
        assert history.epoch == [0, 1]


@pytest.mark.parametrize(("num_steps", "is_whole"), [(3, True), (2, False)])
def test_an_unfinished_window_of_micro_steps_begins_anew_with_a_warning(tmp_path, num_steps, is_whole):
    def accumulating():
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=num_steps)
        model.compile(optimizer, "mse")
        return model, optimizer

    backup = ks.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model, optimizer = accumulating()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*problem.data(STEPS), batch_size=problem.BATCH_SIZE, callbacks=[backup], shuffle=False, verbose=0)
    said = [str(w.message) for w in caught if "accumulated gradients that no update has used" in str(w.message)]
    assert len(said) == (0 if is_whole else 1), said
    assert bool(optimizer.accumulation.window.num_taken) is not is_whole
    restored, anew = accumulating()
    backup.set_model(restored)
    backup.on_train_begin()
    assert not anew.accumulation.window.num_taken
    assert int(anew.iterations) == int(optimizer.iterations) == STEPS // num_steps
    assert_same([np.asarray(w) for w in restored.get_weights()], [np.asarray(w) for w in model.get_weights()])
