"""A job that SLURM may interrupt: it stops at the end of an epoch, and continues later.

    sbatch examples/slurm/several_nodes.sbatch
    python examples/slurm/train.py --folder result  # without SLURM

After SIGTERM, training stops at the end of the epoch, when `BackupAndRestore` has written a
backup, and the program ends with exit status 75. The batch script then puts the job back
into the queue. The weights at the end are those of an uninterrupted run, bit for bit.
"""

import argparse
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import keras_shardopt as ks

INTERRUPTED = 75  # EX_TEMPFAIL: "try again later"


class StopOnSignal(keras.callbacks.Callback):
    """Ends training after the epoch in which this process received SIGTERM."""

    received = False

    def on_train_begin(self, logs=None):
        # Here, because JAX and TensorFlow set handlers of their own when processes connect.
        signal.signal(signal.SIGTERM, self.note)

    def note(self, number, frame):
        self.received = True

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= self.received


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=pathlib.Path, required=True, help="all machines share it"
    )
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--pause", type=float, default=0, help="seconds of waiting per epoch"
    )
    arguments = parser.parse_args()

    with ks.data_parallel() as replicas:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(16, activation="tanh")
        model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
        sgd = keras.optimizers.SGD(arguments.learning_rate, momentum=0.9)
        model.compile(ks.CrossShard(sgd), "mse")
    x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))

    stop = StopOnSignal()
    backup = ks.callbacks.BackupAndRestore(
        arguments.folder / "backup", delete_checkpoint=False
    )
    wait = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: time.sleep(arguments.pause)
    )
    try:
        history = model.fit(
            *(x, y),
            batch_size=16,
            epochs=arguments.epochs,
            shuffle=False,
            callbacks=[backup, stop, wait],
            verbose=0,
        )
    finally:
        # Also after errors: all raise if some received the signal after the epoch ended.
        if stop.received:
            print("interrupted", flush=True)
            sys.exit(INTERRUPTED)
    ks.save_model(model, arguments.folder / "model.keras")
    if replicas.is_chief:
        first = history.epoch[0] if history.epoch else arguments.epochs
        print(f"{replicas.num_replicas} replicas, first epoch {first}")


if __name__ == "__main__":
    main()
