"""Trains with backups, on ranks that torchrun starts again when one of them has killed itself.

Arguments: a folder, and the steps in which rank 1 dies: in the first of them when it was started first, and so on.
"""

import os
import pathlib
import signal
import sys
import warnings

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

warnings.filterwarnings("ignore")

EPOCHS, STEPS = 6, 5


class Dying(keras.callbacks.Callback):
    """Kills this rank after the update with this number."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_begin(self, logs=None):
        print(f"begins with epoch {self.model._initial_epoch or 0}", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    folder, deaths = pathlib.Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    keras.utils.set_random_seed(5)
    with ks.data_parallel(timeout=60) as scope:
        model = keras.Sequential(
            [
                keras.Input((problem.NUM_FEATURES,)),
                keras.layers.Dense(7, activation="tanh"),
                keras.layers.Dropout(0.3),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(problem.NUM_OUTPUTS),
            ]
        )
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.9)
        model.compile(ks.CrossShard(ks.LossScaling(keras.optimizers.Adam(rate, use_ema=True))), "mse")
    ks.prepare(model)
    # The second rank has a row less, so that the parts are unequal; `fit` shuffles each rank's own.
    x, y = (
        problem.rows_of_replica(a, scope.replica_id, 2)[: 8 * STEPS - scope.replica_id] for a in problem.data(STEPS)
    )
    step = deaths[attempt] if scope.replica_id == 1 and attempt < len(deaths) else None
    backup = ks.callbacks.BackupAndRestore(folder / "backup" if scope.is_chief else folder / "nowhere")
    model.fit(x, y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[backup, Dying(step)])
    assert not (folder / "nowhere").exists() and not (folder / "backup").exists()
    if scope.is_chief:
        variables = [*model.variables, *model.optimizer.variables]
        arrays = {f"{i} {v.path}": keras.ops.convert_to_numpy(v) for i, v in enumerate(variables)}
        np.savez(folder / "end.npz", **{name.replace("/", " "): array for name, array in arrays.items()})


main()
