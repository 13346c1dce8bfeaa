"""A character-level language model, trained with `optimize_loss` on the texts that Python's `help()` prints.

    python examples/char_lm.py --replicas 4                          # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/char_lm.py --larc
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/char_lm.py
    python examples/char_lm.py --with-fit                            # the same through `compile` and `fit`

Prints bits per character, which fall, on text that was held out. `--log-dir` takes TensorBoard's event files.
"""

import argparse
import os
import pydoc_data.topics

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import keras_shardopt as ks

WINDOW = 32


def text():
    joined = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return np.frombuffer(joined.encode("ascii", "replace"), "uint8").astype("int32") % 128


def batches(characters, batch_size, seed):
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(characters) - WINDOW - 1, batch_size)
        rows = np.stack([characters[start : start + WINDOW + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="how many; default: all devices, or all torchrun processes")
    parser.add_argument("--steps", type=int, default=600, help="updates")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a micro-step, over all replicas")
    parser.add_argument("--iter-size", type=int, default=2, help="micro-steps of an update")
    parser.add_argument("--larc", action="store_true", help="LARC instead of clipping")
    parser.add_argument("--with-fit", action="store_true", help="compile(build_optimizer(...)) and fit")
    parser.add_argument("--log-dir", help="where TensorBoard's files go")
    parser.add_argument("--every", type=int, default=10, help="write every so many updates")
    arguments = parser.parse_args()
    keras.utils.set_random_seed(1)

    # LARC sets the length of each step, so it goes with momentum; before Adam it would mostly cancel.
    if arguments.larc:
        how = {"optimizer": "Momentum", "optimizer_params": {"momentum": 0.9}, "larc_params": {"larc_eta": 0.02}}
    else:
        how = {"optimizer": "Adam", "clip_gradients": 1.0}
    rate = ks.schedules.CosineDecay(1.0 if arguments.larc else 4e-3, decay_steps=arguments.steps)
    how |= {"learning_rate_decay_fn": rate, "loss_scaling": "Backoff", "iter_size": arguments.iter_size}
    watch = {"summaries": ["learning_rate", "loss_scale", "global_gradient_norm", "gradient_norm", "variable_norm"]}
    watch["summaries"] += ["gradients", "variables", "larc_summaries"]
    with ks.data_parallel(arguments.replicas) as replicas:
        layers = [
            keras.Input((WINDOW,), dtype="int32"),
            keras.layers.Embedding(128, 32, keras.initializers.RandomNormal(stddev=1.0)),
        ]
        # Each sees what is before it: 2, 4, 8, 16 and at last 32 characters.
        layers += [
            keras.layers.Conv1D(64, 2, dilation_rate=2**i, padding="causal", activation="relu") for i in range(5)
        ]
        model = keras.Sequential([*layers, keras.layers.Dense(128)])
        error = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if arguments.with_fit:
            model.compile(ks.build_optimizer(**how, cross_shard=True), error)
        else:
            step = ks.optimize_loss(
                lambda x, y: error(y, model(x, training=True)),
                **how,
                on_horovod=True,
                model=model,
                log_dir=arguments.log_dir,
                every=arguments.every,
                **(watch if arguments.log_dir else {}),
            )

    characters = text()
    held_out = characters[-20_000:]
    # Each process feeds rows of its own.
    num_rows = arguments.batch_size // replicas.num_processes
    micro_steps = arguments.steps * arguments.iter_size
    data = batches(characters[:-20_000], num_rows, seed=replicas.process_id)
    windows = held_out[: 256 * (WINDOW + 1)].reshape(256, WINDOW + 1)

    def bits_per_character():
        logits = np.concatenate([keras.ops.convert_to_numpy(model(part)) for part in np.split(windows[:, :-1], 8)])
        logits = logits - logits.max(-1, keepdims=True)
        nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
        return nats.mean() / np.log(2)

    def tell(update):
        if replicas.is_chief:
            print(f"after {update:4} updates: {bits_per_character():.2f} bits per character", flush=True)

    tell(0)
    if arguments.with_fit:
        callback = ks.callbacks.TrainingSummaries(arguments.log_dir, every=arguments.every)
        model.fit(data, steps_per_epoch=micro_steps, callbacks=[callback], verbose=2 if replicas.is_chief else 0)
    else:
        for i, (x, y) in zip(range(1, micro_steps + 1), data):
            step(x, y)
            if i % (micro_steps // 4) == 0 and i < micro_steps:
                tell(i // arguments.iter_size)
        step.close()
    tell(arguments.steps)
    difference = replicas.largest_difference(model)
    if replicas.is_chief:
        print(f"largest difference between {replicas.num_replicas} replicas: {difference:g}")


if __name__ == "__main__":
    main()
