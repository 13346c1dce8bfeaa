"""Kills processes (-9) while they save over and over into one file, and reads what is there after each.

Arguments: a folder, and `--rounds` for how many processes to kill. `--fault` kills so many more that write into the
file itself, as one would without thinking, which must not go well. Prints what was found, as JSON. The same Python code
writes the file on each backend; PyTorch is the one that can be forked.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import time
import warnings

import keras

import keras_shardopt as ks
from keras_shardopt.checkpoint import saving
from keras_shardopt.checkpoint.sharded.saves import complete_saves, delete, incomplete_saves

NUM_FEATURES = 400  # some megabytes with Adam's state


class InPlace:
    """Stands in for `Unfinished`: writes into the file itself."""

    def __init__(self, path):
        self.path = path

    def finish(self):
        pass

    def discard(self):
        pass


def made():
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), keras.layers.Dense(NUM_FEATURES)])
    model.compile(ks.CrossShard(keras.optimizers.Adam()), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fill(model, number):
    """Makes every number of the model's this one."""
    for variable in [*model.variables, *model.optimizer.variables]:
        variable.assign(keras.ops.full(variable.shape, number, dtype=variable.dtype))


def number_in(model, path):
    """The number of which the file is full; None if it is torn."""
    fill(model, -1)
    try:
        ks.load_sharded(model, path) if os.path.isdir(path) else model.load_weights(path)
    except Exception:  # what is torn fails in many ways
        return None
    arrays = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    found = {float(number) for array in arrays for number in (array.min(), array.max())}
    return int(found.pop()) if len(found) == 1 else None


def save_sharded(model, directory):
    """Saves a checkpoint next to those of before, and deletes all but two."""
    ks.save_sharded(model, directory)
    for folder in complete_saves(directory)[:-2]:
        delete(folder)


def save_for_ever(model, save, path, number, said):
    while True:
        number += 1
        fill(model, number)
        save(model, path)
        os.write(said, b"%d\n" % number)


def killed_after(seconds, model, save, path, number):
    """The last number that a process has saved, and said so, before it was killed."""
    read, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(model, save, path, number, said)
        finally:
            os._exit(1)  # it ends by being killed only
    os.close(said)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the process failed before it was killed"
    with os.fdopen(read, "rb") as pipe:
        numbers = pipe.read().split()
    return int(numbers[-1]) if numbers else number


SAVES = {"model.weights.h5": ks.save_weights, "model.keras": ks.save_model, "sharded": save_sharded}


def kills(model, folder, rounds, chance):
    """What was found after each of so many kills."""
    counts = dict(rounds=rounds, torn=0, lost=0, in_the_middle=0, saved=0)
    for file, save in SAVES.items():
        path = str(folder / file)
        number = 1
        fill(model, number)
        save(model, path)
        start = time.monotonic()  # the first takes longer
        save(model, path)
        usual = time.monotonic() - start
        for _ in range(rounds // len(SAVES)):
            before = len(incomplete_saves(path))
            last = killed_after(chance.uniform(0, 3 * usual), model, save, path, number)
            is_unfinished = len(incomplete_saves(path)) > before or any(folder.glob(".*.unfinished"))
            counts["in_the_middle"] += is_unfinished
            found = number_in(model, path)
            if found is None:
                counts["torn"] += 1
                fill(model, number)
                save(model, path)
                continue
            # A file that was said to be there is there, or the one after it.
            counts["lost"] += found not in (last, last + 1)
            counts["saved"] += found - number
            number = found
        save(model, path)
    return {**counts, "left_behind": sorted(name for name in os.listdir(folder) if not is_without_lock(folder / name))}


def is_without_lock(path):
    """Of one that was killed before it had taken its lock, which stays as long as it may be that of a living one."""
    return path.suffix == ".unfinished" and ".lock" not in os.listdir(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--fault", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    chance = random.Random(arguments.seed)
    model = made()
    print(json.dumps(kills(model, arguments.folder, arguments.rounds, chance)), flush=True)
    if arguments.fault:
        saving.Unfinished = InPlace
        (arguments.folder / "fault").mkdir()
        print(json.dumps(kills(model, arguments.folder / "fault", arguments.fault, chance)))


if __name__ == "__main__":
    main()
