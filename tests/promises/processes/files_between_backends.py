"""Writes models on one backend, waits for those of the other two, and reads all. Argument: the folder."""

import pathlib
import sys
import time
import warnings

import keras
import numpy as np
from support import catalogue, problem

BACKENDS = ("jax", "tensorflow", "torch")
BACKEND = keras.config.backend()
INNERS = ["SGD momentum", "Adam", "Adam schedule", "Adam ema", "Adafactor", "LossScaleOptimizer", "MultiOptimizer"]
# Every kind of inner optimizer in one wrapper, and one in each of the others, which save by the same code.
PAIRS = [("CrossShard", inner) for inner in INNERS]
PAIRS += [(w, "Adam") for w in catalogue.WRAPPERS if w != "CrossShard" and " " not in w]


# A file says how its model is compiled. This one as usual, so other backends compile it too: that takes each of them
# longer than all else here.
COMPILED = ("CrossShard", "Adam")


def write(folder):
    for pair in PAIRS:
        optimizer, model = catalogue.make(*pair), None
        if pair != COMPILED:
            model = problem.model()
            model.compile(optimizer, "mse", run_eagerly=True)
        model = catalogue.trained(optimizer, model=model)
        stem = folder / " ".join([BACKEND, *pair])
        model.save(f"{stem}.keras")
        np.savez(f"{stem}.npz", *catalogue.state_of(model.optimizer))
    for inner in INNERS:
        model = problem.model()
        model.compile(catalogue.plain(inner), "mse")
        model.optimizer.build(model.trainable_variables)
        # The values that training has left above: for files any will do.
        saved = state(folder / f"{BACKEND} CrossShard {inner}.npz")
        for variable, value in zip(model.optimizer.variables, saved, strict=True):
            variable.assign(value)
        stem = folder / f"{BACKEND} plain {inner}"
        model.save_weights(f"{stem}.weights.h5")
        np.savez(f"{stem}.npz", *saved)


def meet(folder):
    (folder / f"{BACKEND} is done").touch()
    while not all((folder / f"{backend} is done").exists() for backend in BACKENDS):
        time.sleep(0.1)


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


def main():
    warnings.filterwarnings("ignore")
    folder = pathlib.Path(sys.argv[1])
    write(folder)
    meet(folder)
    read(folder)


main()
