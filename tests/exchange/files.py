"""Writes models on one backend, or reads those of all three. Arguments: write FOLDER, or read FOLDER."""

import pathlib
import sys
import warnings

import keras
import numpy as np
from support import catalogue, problem

BACKENDS = ("jax", "tensorflow", "torch")
INNERS = ["SGD momentum", "Adam", "Adam schedule", "Adam ema", "Adafactor", "LossScaleOptimizer", "MultiOptimizer"]
# Every kind of inner optimizer in one wrapper, and one in each of the others, which save by the same code.
PAIRS = [("CrossShard", inner) for inner in INNERS]
PAIRS += [(w, "Adam") for w in catalogue.WRAPPERS if w != "CrossShard" and " " not in w]


def write(folder):
    for wrapper, inner in PAIRS:
        model = catalogue.trained(catalogue.make(wrapper, inner))
        stem = folder / f"{keras.config.backend()} {wrapper} {inner}"
        model.save(f"{stem}.keras")
        np.savez(f"{stem}.npz", *catalogue.state_of(model.optimizer))
    for inner in INNERS:
        model = catalogue.trained(catalogue.plain(inner))
        stem = folder / f"{keras.config.backend()} plain {inner}"
        model.save_weights(f"{stem}.weights.h5")
        np.savez(f"{stem}.npz", *catalogue.state_of(model.optimizer))


def state(file):
    arrays = np.load(file)
    return [arrays[name] for name in arrays.files]


def check_equal(optimizer, saved):
    found = catalogue.state_of(optimizer)
    assert len(found) == len(saved)
    for a, b in zip(found, saved):
        np.testing.assert_array_equal(a, b)


def read(folder):
    x, y = problem.data(num_steps=1)
    for origin in BACKENDS:
        for wrapper, inner in PAIRS:
            stem = folder / f"{origin} {wrapper} {inner}"
            model = keras.saving.load_model(f"{stem}.keras")
            check_equal(model.optimizer, state(f"{stem}.npz"))
            model.train_on_batch(x, y)
            print("model", stem.name, flush=True)
        for inner in INNERS:
            stem = folder / f"{origin} plain {inner}"
            model = problem.model()
            model.compile(catalogue.make("CrossShard", inner), "mse")
            model.optimizer.build(model.trainable_variables)
            model.load_weights(f"{stem}.weights.h5")
            check_equal(model.optimizer, state(f"{stem}.npz"))
            print("weights", stem.name, flush=True)


warnings.filterwarnings("ignore")
{"write": write, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
