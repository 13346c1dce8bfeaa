"""One process of a `jax.distributed` job that has one device, as where each process has a GPU.

Argument: a file, to which process 0 writes what came of it.
"""

import pathlib
import pickle
import sys

import keras
from promises.problems import whole_data
from promises.problems.whole_data import BATCH, X, Y

import keras_shardopt as ks


def main():
    keras.distribution.initialize()
    with ks.data_parallel() as scope:
        model = whole_data.compiled(ks.CrossShard)
    keras.utils.set_random_seed(3)
    assert (scope.num_processes, scope.num_replicas) == (2, 2)
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, validation_split=0.1, verbose=0).history
    model.set_weights([weight + scope.process_id for weight in model.get_weights()])  # process 0's are taken
    model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0)
    assert scope.largest_difference(model) == 0
    outputs = model.predict(X, batch_size=BATCH, verbose=0)
    if scope.is_chief:
        pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps((history, model.get_weights(), outputs)))
    scope.close()


if __name__ == "__main__":
    main()
