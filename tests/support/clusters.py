"""A program for commands that start copies of a program, such as `srun`, and a check of their result."""

import numpy as np
from support import problem

PROGRAM = """
import pathlib, sys
import keras_shardopt as ks
import numpy as np
from support import problem

with ks.data_parallel() as replicas:
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
model.fit(*problem.data(), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
np.savez(pathlib.Path(sys.argv[1]) / f"{replicas.process_id}.npz", *model.get_weights())
print(repr(replicas), flush=True)
"""
ALONE = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def check(folder, printed, size, command):
    for rank in range(size):
        assert f"{size} replicas, process {rank} of {size}, devices cpu" in printed, printed
    assert printed.count(f", started by {command}>") == size
    for rank in range(size):
        with np.load(folder / f"{rank}.npz") as found:
            weights = [found[name] for name in found.files]
        assert problem.relative_difference(weights, problem.trained_in_numpy()) <= 3 * problem.TOLERANCE
