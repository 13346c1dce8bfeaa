"""Trains with backups, on ranks that are started again when one of them has killed itself.

By torchrun; started without it, by its agent in this process, which forks two ranks that need not import all again.

Arguments: a folder; "whole", "sharded" for ranks that hold a part of the state each, or "pieces" for such ranks that
each write a part of the backup; and the steps in which rank 1 dies: in the first of them when it was started first,
and so on.
"""

import os
import pathlib
import sys
import warnings

import keras
import numpy as np
from promises.problems import restarting
from support import launch, problem
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import keras_shardopt as ks

warnings.filterwarnings("ignore")

EPOCHS, STEPS = 6, 5


class Noise(keras.layers.Layer):
    """Draws from a generator of its own, and from Keras' global one."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator()

    def call(self, inputs, training=False):
        for seed in (self.seeds, None) if training else ():
            inputs = inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs), seed=seed)
        return inputs


def main():
    folder, deaths = pathlib.Path(sys.argv[1]), [int(step) for step in sys.argv[3:]]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    keras.utils.set_random_seed(5)
    with ks.data_parallel(timeout=60) as scope:
        model = keras.Sequential(restarting.layers(Noise()))
        model.compile(ks.CrossShard(ks.LossScaling(restarting.adam()), shard_state=sys.argv[2] != "whole"), "mse")
    # A row less, so that the last parts are unequal; `fit` shuffles.
    x, y = (a[:-1] for a in problem.data(STEPS))
    step = deaths[attempt] if scope.replica_id == 1 and attempt < len(deaths) else None
    sharded = sys.argv[2] == "pieces"
    backup = ks.callbacks.BackupAndRestore(
        folder / "backup" if scope.is_chief or sharded else folder / "nowhere", sharded=sharded
    )
    model.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=[backup, restarting.Dying(step)])
    assert not (folder / "nowhere").exists() and not (folder / "backup").exists()
    saved = restarting.values(model.variables)
    for name, part in (("state", model.optimizer), ("scaling", model.optimizer.wrapper_state)):
        store = {}
        part.save_own_variables(store)  # on all ranks, which have it together
        saved |= {f"{name} {key}": array for key, array in store.items()}
    if scope.is_chief:
        np.savez(folder / "end.npz", **saved)


def start_ranks():
    (port,) = launch.free_ports(1)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=2,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, main)()


if "RANK" in os.environ:
    main()
else:
    start_ranks()
