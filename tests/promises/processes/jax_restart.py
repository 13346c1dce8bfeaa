"""Trains with backups in a process of a `jax.distributed` job, of which one kills itself.

Arguments: a folder, and the step in which process 1 dies; without it nobody does. Where one is to die, a training that
is never interrupted goes before, in the same processes.
"""

import os
import pathlib
import sys
import time
import warnings

import jax
import keras
import numpy as np
from promises.problems import restarting
from support import problem
from support.launch import patient

import keras_shardopt as ks

warnings.filterwarnings("ignore")

EPOCHS, STEPS = 4, 5
TIMEOUT = round(patient(10))  # seconds, which a busy machine may keep a process waiting; JAX's own is 100


def train(scope, callbacks):
    """The names and values of all variables at the end."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with ks.data_parallel():
        model = keras.Sequential(restarting.layers())
        inner = ks.LossScaling(restarting.adam())
        optimizer = ks.CrossShard(inner, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse")
    ks.prepare(model, auto_shard=False)
    x, y = (problem.rows_of_replica(a, scope.process_id, scope.num_processes) for a in problem.data(2 * STEPS))
    model.fit(x, y, batch_size=len(x) // (2 * STEPS), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return restarting.values([*model.variables, *optimizer._shared_variables])


def main():
    folder = pathlib.Path(sys.argv[1])
    step = int(sys.argv[2]) if len(sys.argv) > 2 else None
    # What `keras.distribution.initialize()` does, but with limits: else those who are left wait 5 minutes at the end.
    jax.distributed.initialize(
        os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"],
        int(os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"]),
        int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]),
        heartbeat_timeout_seconds=TIMEOUT,
        shutdown_timeout_seconds=TIMEOUT,
    )
    with ks.data_parallel() as scope:
        pass
    if step is not None:
        alone = train(scope, [])
        if scope.is_chief:
            np.savez(folder / "alone.npz", **alone)
    backup = ks.callbacks.BackupAndRestore(folder / "backup" if scope.is_chief else folder / "nowhere")
    try:
        end = train(scope, [backup, restarting.Dying(step if scope.process_id == 1 else None, folder / "died")])
    except Exception as error:
        died = float((folder / "died").read_text())
        print(f"after {time.time() - died:.1f} s: {type(error).__name__}", flush=True)
        raise
    if scope.is_chief:
        np.savez(folder / "end.npz", **end)


main()
