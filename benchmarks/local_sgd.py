"""Held-out loss of local SGD, compared with synchronous training with as many updates or bytes.

    python benchmarks/local_sgd.py characters --updates 2400
    python benchmarks/local_sgd.py digits --only "synchronous" "mean, H=20"
    python benchmarks/local_sgd.py characters --updates 1000 --mbit 100 --only "synchronous" "DiLoCo, H=20"

Trains the same model on four ranks of PyTorch (gloo, one thread each) from the same weights on the same batches, once
per method. Prints a line of JSON for each: the held-out loss after every hundred updates, the bytes that each rank gave
to reductions, and the seconds of training without evaluation. `--mbit` simulates a network of this rate: each reduction
sleeps for the time that a ring of four ranks would need.
"""

import argparse
import json
import os
import pydoc_data.topics
import socket
import time

RANKS = 4
BATCH_SIZE = 64
WINDOW = 32
EPOCH = 100  # updates between two evaluations


def characters(updates):
    """Windows of Python's help texts, and the same shifted by one character; the last tenth is held out."""
    import numpy as np

    topics = pydoc_data.topics.topics
    joined = "\n".join(topics[name] for name in sorted(topics))
    text = np.frombuffer(joined.encode("ascii", "replace"), "uint8").astype("int32") % 128
    cut = len(text) * 9 // 10
    random = np.random.default_rng(3)

    def windows(begin, end, number):
        starts = random.integers(begin, end - WINDOW - 1, (number, 1))
        rows = text[starts + np.arange(WINDOW + 1)]
        return rows[:, :-1], rows[:, 1:]

    return windows(0, cut, updates * BATCH_SIZE), windows(cut, len(text), 512)


def characters_model():
    """The model of examples/char_lm.py."""
    import keras

    layers = [
        keras.Input((WINDOW,), dtype="int32"),
        keras.layers.Embedding(128, 32, keras.initializers.RandomNormal(stddev=1.0)),
    ]
    for i in range(5):
        layers.append(keras.layers.Conv1D(64, 2, dilation_rate=2**i, padding="causal", activation="relu"))
    return keras.Sequential([*layers, keras.layers.Dense(128)])


def digits(updates):
    """Handwritten digits in random order, 1,400 to train on and 397 held out."""
    import numpy as np
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    random = np.random.default_rng(3)
    order = random.permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    rows = np.concatenate([random.permutation(1400) for _ in range(updates * BATCH_SIZE // 1400 + 1)])
    rows = rows[: updates * BATCH_SIZE]
    return (x[rows], y[rows]), (x[1400:], y[1400:])


def digits_model():
    """Nearly the model of examples/digits.py."""
    import keras

    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


TASKS = {"characters": (characters, characters_model, 2e-3), "digits": (digits, digits_model, 1e-3)}


def ways(updates):
    """Returns, by name, the arguments of `CrossShard` and the number of updates."""
    found = {"synchronous": ({}, updates)}
    outer = {"class_name": "SGD", "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}}
    for every in (5, 20, 50):
        found[f"mean, H={every}"] = ({"sync_every": every}, updates)
        found[f"DiLoCo, H={every}"] = ({"sync_every": every, "outer_optimizer": outer}, updates)
        cold = {"sync_every": every, "outer_optimizer": outer, "sync_warmup": 0}
        found[f"DiLoCo without warm-up, H={every}"] = (cold, updates)
        found[f"synchronous with the bytes of H={every}"] = ({}, updates // every)
        warm = 5 * every
        more = warm + (updates - warm) // every
        found[f"synchronous with the bytes of DiLoCo, H={every}"] = ({}, more)
    return found


def work(rank, port, arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import keras
    import torch
    import torch.distributed as dist

    import keras_shardopt as ks

    torch.set_num_threads(1)
    sent = {"bytes": 0, "reductions": 0}
    reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        size = tensor.numel() * tensor.element_size()
        sent["bytes"] += size
        sent["reductions"] += size > 64
        if arguments.mbit and size > 64:
            time.sleep(2 * (RANKS - 1) / RANKS * size * 8 / (arguments.mbit * 1e6))
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    data, model_of, rate = TASKS[arguments.task]
    (x, y), held_out = data(arguments.updates)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.seconds, self.begin = [], time.perf_counter()

        def on_test_begin(self, logs=None):
            self.before = time.perf_counter()

        def on_test_end(self, logs=None):
            self.seconds.append(round(self.before - self.begin, 2))
            self.begin += time.perf_counter() - self.before

    for name, (how, updates) in ways(arguments.updates).items():
        if arguments.only and name not in arguments.only:
            continue
        with ks.data_parallel() as replicas:
            keras.utils.set_random_seed(arguments.seed)
            model = model_of()
            model.compile(ks.CrossShard(keras.optimizers.Adam(rate), **how), loss)
        sent.update(bytes=0, reductions=0)
        clock, steps = Clock(), updates // -(-updates // EPOCH)
        history = model.fit(
            x[: updates * BATCH_SIZE],
            y[: updates * BATCH_SIZE],
            batch_size=BATCH_SIZE,
            steps_per_epoch=steps,
            epochs=max(updates // steps, 1),
            shuffle=False,
            verbose=0,
            validation_data=held_out,
            validation_batch_size=512,
            callbacks=[clock],
        )
        if rank == 0:
            losses = [round(value, 4) for value in history.history["val_loss"]]
            found = {"task": arguments.task, "way": name, "updates": updates, "every": steps, "mbit": arguments.mbit}
            found |= {"seed": arguments.seed, "weights": model.count_params(), **sent}
            found |= {"losses": losses, "seconds": clock.seconds}
            line = json.dumps(found)
            print(line, flush=True)
            if arguments.to:
                with open(arguments.to, "a") as file:
                    file.write(line + "\n")
        dist.barrier()
        replicas.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--updates", type=int, default=2400, help="number of updates")
    parser.add_argument("--seed", type=int, default=1, help="seed of the initial weights")
    parser.add_argument("--mbit", type=float, help="rate of the simulated network, in Mbit/s")
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--to", help="file to append the lines to")
    arguments = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.multiprocessing

    import keras_shardopt  # noqa: F401 - before the ranks are forked

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(work, (port, arguments), RANKS, start_method="fork")


if __name__ == "__main__":
    main()
