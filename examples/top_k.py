"""A custom gradient codec: top-k sparsification with error feedback.

    python examples/top_k.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/top_k.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/top_k.py

`TopK` is the whole extension: replicas exchange the largest elements of each gradient, and
add the rest to their next gradients. Trains on handwritten digits three times from the same
weights, and prints the loss on held-out digits.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras import ops

import keras_shardopt as ks


@keras.saving.register_keras_serializable("examples")
class TopK(ks.compression.Compression):
    """Sends the largest elements of each gradient, and their positions.

    Args:
        fraction: float in (0, 1]. The fraction of each variable's elements that is sent.
        error_feedback: bool. Whether to add the rest to the next gradients.

    References:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.
    """

    def __init__(self, fraction=0.01, error_feedback=True):
        super().__init__(error_feedback)
        if not 0 < fraction <= 1:
            raise ValueError(f"`fraction` must be in (0, 1]. Received: fraction={fraction}")
        self.fraction = fraction

    def legs(self, tensors, along, num_replicas, replica_id, update, factors):
        flat = [ops.reshape(tensor, (-1,)) for tensor in tensors]
        positions = [self.largest(values) for values in flat]
        values = [ops.take(each, where) for each, where in zip(flat, positions)]
        # One collective for all variables. Its result has a row for each replica.
        sent = [ops.concatenate(values), ops.concatenate(positions)]
        rows = [
            ops.reshape(each, (num_replicas, -1)) for each in (yield "all_gather", sent)
        ]
        sums, unsent, start = [], [], 0
        for each, own, where in zip(flat, values, positions):
            stop = start + where.shape[0]
            everyones = [ops.reshape(row[:, start:stop], (-1,)) for row in rows]
            sums.append(placed(each, *everyones))
            unsent.append(each - placed(each, own, where))
            start = stop
        along = (yield "all_reduce", along) if along else []
        sums, unsent = [
            [ops.reshape(each, tensor.shape) for each, tensor in zip(some, tensors)]
            for some in (sums, unsent)
        ]
        return ks.compression.Reduced(sums, along, unsent, [])

    def largest(self, values):
        count = max(1, round(self.fraction * values.shape[0]))
        sizes = ops.where(ops.isfinite(values), ops.abs(values), float("inf"))
        return ops.cast(
            ops.top_k(sizes, count)[1], "int32"
        )  # NaN has priority, so all replicas skip the update


def placed(like, values, positions):
    """Return zeros like a vector, plus these values at these positions."""
    return ops.scatter(positions[:, None], values, tuple(like.shape))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, help="number of replicas (default: all)")
    parser.add_argument("--epochs", type=int, default=9, help="number of epochs")
    arguments = parser.parse_args()

    from sklearn.datasets import load_digits  # tests of `TopK` do not need it

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    codecs = {
        "everything": None,
        "1 % with feedback": TopK(0.01),
        "1 % without": TopK(0.01, error_feedback=False),
    }
    for name, codec in codecs.items():
        keras.utils.set_random_seed(1)
        with ks.data_parallel(arguments.replicas) as replicas:
            hidden = keras.layers.Dense(64, activation="relu")
            model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            sgd = keras.optimizers.SGD(0.05, momentum=0.9)
            model.compile(ks.CrossShard(sgd, compression=codec), loss)
        data = {"batch_size": 64, "epochs": arguments.epochs, "verbose": 0}
        model.fit(images[:1400], labels[:1400], **data)
        error = model.evaluate(images[1400:], labels[1400:], verbose=0)
        if replicas.is_chief:
            print(f"{replicas.num_replicas} replicas, {name:20}  loss {error:.4f}")


if __name__ == "__main__":
    main()
