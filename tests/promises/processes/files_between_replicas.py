"""Trains and saves on 1, 2 and 4 replicas of a backend, or goes on from what those of all backends have saved.

Arguments: `write FOLDER` or `read FOLDER`. Four replicas hold a part of the state each, two and one all of it. PyTorch
is started on four ranks, of which some go home early; elsewhere one process has all replicas.
"""

import os
import pathlib
import sys
import warnings

import keras
import numpy as np
from support import catalogue, problem

import keras_shardopt as ks

BACKENDS = ("jax", "tensorflow", "torch")
BACKEND = keras.config.backend()
COUNTS = (4, 2, 1)  # from all ranks to one
STEPS_BEFORE, STEPS_AFTER = 3, 3


def compiled(arguments):
    model = problem.model()
    model.compile(ks.CrossShard(ks.LossScaling(keras.optimizers.Adam(0.01)), **arguments), "mse")
    return model


def train(model, replicas, first, last):
    """The steps from `first` to `last`, of batches that are the same for any number of replicas."""
    x, y = (a[first * problem.BATCH_SIZE : last * problem.BATCH_SIZE] for a in problem.data(STEPS_BEFORE + STEPS_AFTER))
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)


def state(model):
    """What a file of one replica would hold, whoever has the parts."""
    store = {}
    model.optimizer.save_own_variables(store)
    own = {}
    model.optimizer.wrapper_state.save_own_variables(own)
    return [np.asarray(array) for array in [*store.values(), *own.values()]]


def write(folder, replicas, arguments):
    model = compiled(arguments)
    train(model, replicas, 0, STEPS_BEFORE)
    stem = folder / f"{BACKEND} {replicas.num_replicas}"
    ks.save_model(model, f"{stem}.keras")
    ks.save_weights(model, f"{stem}.weights.h5")
    ks.save_sharded(model, f"{stem}.sharded")
    for name, other, values in others(arguments):
        other.optimizer.load_own_variables({str(i): value for i, value in enumerate(values)})
        ks.save_sharded(other, f"{stem} {name}.sharded")
    saved = [*model.get_weights(), *state(model)]
    train(model, replicas, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    if replicas.is_chief:
        np.savez(f"{stem}.npz", *saved)
        np.savez(f"{stem}.after.npz", *model.get_weights())


def arrays(file):
    found = np.load(file)
    return [found[name] for name in found.files]


def check_equal(model, saved):
    found = [*model.get_weights(), *state(model)]
    assert len(found) == len(saved) == 4 + 10 + len(catalogue.OWN_STATE["LossScaling"])
    for one, other in zip(found, saved):
        np.testing.assert_array_equal(one, other)


OTHERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}
"""Optimizers whose state travels in sharded checkpoints only, without training."""


def others(arguments):
    """For each of the optimizers a model that is compiled with it, and arrays that its state may have."""
    for name, make in OTHERS.items():
        cannot_divide = BACKEND == "tensorflow" and name in ("Adafactor", "Muon")
        model = problem.model()
        model.compile(ks.CrossShard(make(), **({} if cannot_divide else arguments)), "mse")
        model.optimizer.build(model.trainable_variables)
        plain = make()
        plain.build([keras.Variable(np.zeros(v.shape, "float32")) for v in model.trainable_variables])
        drawn = np.random.default_rng(len(name))
        arrays = [drawn.uniform(0.1, 1, size=v.shape).astype(v.dtype) for v in plain.variables]
        yield name, model, arrays


def read_others(folder, arguments):
    for name, model, values in others(arguments):
        for origin in BACKENDS:
            for count in COUNTS:
                ks.load_sharded(model, folder / f"{origin} {count} {name}.sharded")
                store = {}
                model.optimizer.save_own_variables(store)
                assert len(store) == len(values)
                for found, value in zip(store.values(), values):
                    np.testing.assert_array_equal(found, value)


def read(folder, replicas, arguments):
    read_others(folder, arguments)
    # One model, as a step is compiled once for each; `.keras` files of other backends are read in files.py.
    model = compiled(arguments)
    model.optimizer.build(model.trainable_variables)
    for origin in BACKENDS:
        for count in COUNTS:
            stem = folder / f"{origin} {count}"
            saved, after = arrays(f"{stem}.npz"), arrays(f"{stem}.after.npz")
            if origin == BACKEND:
                check_equal(keras.saving.load_model(f"{stem}.keras"), saved)
            model.load_weights(f"{stem}.weights.h5")
            check_equal(model, saved)
            model.set_weights([0 * weight for weight in model.get_weights()])
            assert ks.load_sharded(model, f"{stem}.sharded") == (STEPS_BEFORE, 0)
            check_equal(model, saved)
            train(model, replicas, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
            # In units of what the steps after the file have moved: rounding differs, and nothing else.
            difference = problem.relative_difference(model.get_weights(), after, saved[:4])
            assert difference <= 3 * problem.TOLERANCE, (stem.name, difference)
            if replicas.is_chief:
                print(f"read {stem.name} on {replicas.num_replicas}: {difference:.1e}", flush=True)


def main():
    warnings.filterwarnings("ignore")
    act = {"write": write, "read": read}[sys.argv[1]]
    for count in COUNTS:
        if BACKEND == "torch":
            if int(os.environ["RANK"]) >= count:
                return
            os.environ["WORLD_SIZE"] = str(count)
        with ks.data_parallel(count) as replicas:
            act(pathlib.Path(sys.argv[2]), replicas, {"shard_state": count == 4})
        replicas.close()


main()
