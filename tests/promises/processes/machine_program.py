"""The README's program, with data, callbacks and a file of what came of it; the same text on every backend.

Arguments: a folder, and perhaps words: "dies RANK EPOCH", where that rank kills itself the first time; "waits", where
each batch takes a while, for many epochs; "slow", where it does in three epochs; "timeout SECONDS"; "parts NUMBER", for
`virtual_replicas`.
"""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
timeout = float(words[words.index("timeout") + 1]) if "timeout" in words else None
parts = {"virtual_replicas": int(words[words.index("parts") + 1])} if "parts" in words else {}
x, y = problem.data()


def build_model():
    return problem.model()


with ks.data_parallel(timeout=timeout) as replicas:
    model = build_model()
    model.compile(optimizer=ks.CrossShard(problem.sgd_momentum(), **parts), loss="mse")


class Watching(keras.callbacks.Callback):
    """Notes when updates are made, and dies where it is told to."""

    def on_train_begin(self, logs=None):
        if replicas.is_chief:
            print(f"begins with epoch {self.model._initial_epoch or 0} on {replicas.num_replicas} replicas", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        if replicas.is_chief:
            (folder / "update").write_text(
                f"{time.time()} {int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))}"
            )
            if (folder / "died").exists() and not (folder / "resumed").exists():
                (folder / "resumed").write_text(str(time.time()))
        if "waits" in words or "slow" in words:
            time.sleep(0.05)

    def on_epoch_begin(self, epoch, logs=None):
        if "dies" in words and not (folder / "died").exists():
            rank, when = map(int, words[words.index("dies") + 1 :][:2])
            if (replicas.process_id, epoch) == (rank, when):
                (folder / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)


backup = ks.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
try:
    begin = time.perf_counter()
    model.fit(
        x,
        y,
        batch_size=16,
        epochs=3 if "waits" not in words else 200,
        shuffle=False,
        verbose=0,
        callbacks=[backup, Watching()],
    )
    print(f"a step took {(time.perf_counter() - begin) / 60 * 1000:.1f} ms", flush=True)
except Exception as error:
    print(f"at {time.time():.1f}: {type(error).__name__}: {error}", flush=True)
    raise
ks.save_model(model, folder / "model.keras")
if replicas.is_chief:
    values = [keras.ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]
    np.savez(folder / "values.npz", *values)
    print(f"{replicas.num_replicas} replicas, {replicas.num_processes} processes", flush=True)
