"""The effect of compressed gradients on accuracy and loss, with and without error feedback, on four replicas.

    KERAS_BACKEND=jax python benchmarks/fewer_bytes.py digits --seeds 10
    KERAS_BACKEND=jax python benchmarks/fewer_bytes.py characters --seeds 10

Writes one line of JSON per training. Replicas are CPU devices of one process. "digits": a network with two hidden
layers on the digits of scikit-learn, SGD with momentum; accuracy on 397 held-out images. "characters": a smaller model
like that of examples/char_lm.py, with Adam; loss in nats on held-out text.
"""

import argparse
import json
import os
import pydoc_data.topics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import keras_shardopt as ks

coded = ks.compression
SCHEMES = {
    "none": None,
    "bfloat16": "bfloat16",
    "int8": coded.Int8(),
    "int8, no feedback": coded.Int8(error_feedback=False),
    "int4": coded.Int4(),
    "int4, no feedback": coded.Int4(error_feedback=False),
    "int4, block 256": coded.Int4(block=256),
    "powersgd": coded.PowerSGD(rank=2, warmup_steps=0),
    "powersgd, no feedback": coded.PowerSGD(rank=2, warmup_steps=0, error_feedback=False),
}


def digits(scheme, seed, steps):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(64, activation="relu")]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    rows = np.random.default_rng(seed).integers(0, 1400, (steps, 64)).reshape(-1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    trained(model, optimizer, scheme, x[rows], y[rows], 64)
    return 100 * float(np.mean(model.predict(x[1400:], verbose=0, batch_size=400).argmax(1) == y[1400:]))


WINDOW = 16


def characters(scheme, seed, steps):
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    text = np.frombuffer(text.encode("ascii", "replace"), "uint8").astype("int32") % 128
    layers = [keras.Input((WINDOW,), dtype="int32"), keras.layers.Embedding(128, 32)]
    for i in range(4):
        layers.append(keras.layers.Conv1D(48, 2, dilation_rate=2**i, padding="causal", activation="relu"))
    model = keras.Sequential([*layers, keras.layers.Dense(128)])

    def windows(starts):
        rows = text[starts[:, None] + np.arange(WINDOW + 1)]
        return rows[:, :-1], rows[:, 1:]

    x, y = windows(np.random.default_rng(seed).integers(0, len(text) - 30_000, 64 * steps))
    trained(model, keras.optimizers.Adam(4e-3), scheme, x, y, 64)
    x, y = windows(len(text) - 20_000 + np.arange(0, 19_000, WINDOW))
    return float(model.evaluate(x, y, verbose=0, batch_size=400))


def trained(model, optimizer, scheme, x, y, batch_size):
    error = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ks.CrossShard(optimizer, compression=SCHEMES[scheme]), error)
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    sent = [collective.dtypes for collective in model.optimizer.communication_report().collectives]
    assert bool(sent) == (SCHEMES[scheme] is not None), sent


TASKS = {"digits": (digits, 300), "characters": (characters, 400)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, help="number of updates (default: by task)")
    parser.add_argument("--replicas", type=int, default=4, help="number of replicas")
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    arguments = parser.parse_args()
    train, steps = TASKS[arguments.task]
    with ks.data_parallel(arguments.replicas):
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for scheme in arguments.schemes:
                keras.utils.set_random_seed(seed)
                start = time.process_time()
                result = train(scheme, seed, arguments.steps or steps)
                told = {"task": arguments.task, "scheme": scheme, "seed": seed, "result": round(result, 5)}
                print(json.dumps(told | {"cpu": round(time.process_time() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
