"""`Heartbeat`: the line of a process at each step, and its stacks if it hangs."""

import json
import os
import time

import keras
import pytest
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends import jobs
from keras_shardopt.callbacks import heartbeat

SECONDS = 0.2  # a step that takes this long counts as hung below


class Reads(keras.callbacks.Callback):
    """Reads the line of this process after each event, and sleeps in one of them."""

    def __init__(self, file, sleeps_at=None):
        super().__init__()
        self.file, self.sleeps_at, self.lines = file, sleeps_at, []

    def read(self):
        (line,) = self.file.read_text().splitlines()
        beat = json.loads(line)
        assert (
            beat["rank"] == 0 and abs(time.time() - time.mktime(time.strptime(beat["time"], "%Y-%m-%dT%H:%M:%S"))) < 60
        )
        self.lines.append((beat["epoch"], beat["step"], beat["phase"]))
        if self.lines[-1] == self.sleeps_at:
            self.hangs_here()

    def hangs_here(self):
        time.sleep(2.5 * SECONDS)

    def on_train_begin(self, logs=None):
        self.read()

    def on_train_batch_begin(self, batch, logs=None):
        self.read()

    def on_test_batch_begin(self, batch, logs=None):
        self.read()

    def on_epoch_end(self, epoch, logs=None):
        self.read()

    def on_train_end(self, logs=None):
        self.read()


def trained(*callbacks, **arguments):
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    x, y = problem.data()
    model.fit(x[:24], y[:24], batch_size=8, verbose=0, callbacks=list(callbacks), **arguments)
    return model


@pytest.mark.exhaustive("tensorflow")
def test_the_line_has_the_running_step_and_phase(tmp_path, monkeypatch):
    watched = tmp_path / "watched"
    monkeypatch.setenv(jobs.HEARTBEATS, str(watched))  # as the launcher's `--watch` sets it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heartbeat, "_SECONDS", 0.0)  # open the files at each step
    beats = ks.callbacks.Heartbeat(os.path.join("new", "beats"), timeout=600)
    moves = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: os.chdir(watched))
    reads, also = Reads(tmp_path / "new" / "beats" / "rank-0.json"), Reads(watched / "rank-0.json")
    data = [array[:8] for array in problem.data()]
    model = trained(beats, moves, reads, also, epochs=2, validation_data=data, validation_batch_size=8)
    steps = lambda epoch: [(epoch, step, "training") for step in (1, 2, 3)]  # noqa: E731
    ends = lambda epoch: [(epoch, 3, "validation"), (epoch, 3, "epoch end")]  # noqa: E731
    expected = [(0, 0, "start"), *steps(1), *ends(1), *steps(2), *ends(2), (2, 3, "ended")]
    assert reads.lines == also.lines == expected
    before = reads.file.read_bytes()
    model.evaluate(*data, callbacks=[beats], verbose=0)
    assert reads.file.read_bytes() == before
    assert sorted(os.listdir(reads.file.parent)) == ["rank-0.json"]


@pytest.mark.parametrize("at", [(1, 2, "training"), (1, 3, "epoch end")])
def test_a_process_that_hangs_writes_its_stacks(tmp_path, monkeypatch, at):
    reads = Reads(tmp_path / "rank-0.json", sleeps_at=at)
    trained(ks.callbacks.Heartbeat(tmp_path, timeout=SECONDS), reads)
    stacks = (tmp_path / "rank-0.stacks").read_text()
    assert stacks.count("in hangs_here") == 1 and stacks.startswith("No step for 0.2 s, at 20"), stacks
    time.sleep(1.5 * SECONDS)  # training has ended, and with it the timer
    assert (tmp_path / "rank-0.stacks").read_text() == stacks


@pytest.mark.exhaustive("tensorflow")
def test_without_a_directory_stacks_go_to_the_standard_error(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv(jobs.HEARTBEATS, "")  # as the launcher sets it without `--watch`
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line").write_text('{"rank": 0, "epoch": 0, "step": 0, "phase": "", "time": "2026-01-01T00:00:00"}')
    monkeypatch.setattr(heartbeat, "_SECONDS", 0.0)
    hangs = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: Reads.hangs_here(None))
    trained(ks.callbacks.Heartbeat(timeout=SECONDS), hangs)
    assert "in hangs_here" in capfd.readouterr().err
    trained(ks.callbacks.Heartbeat(), hangs)
    assert "in hangs_here" not in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["line"]


@pytest.mark.neutral
def test_a_directory_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        ks.callbacks.Heartbeat(tmp_path / "file").on_train_begin()
    (tmp_path / "rank-0.json").mkdir()
    with pytest.raises(IsADirectoryError):
        ks.callbacks.Heartbeat(tmp_path).on_train_begin()
