"""Ranks with data of their own that end at different times, under `fit` and in NumPy."""

from __future__ import annotations

import keras
import numpy as np
from support import problem, references

import keras_shardopt as ks

NUM_ROWS = [13, 40, 26]
"""Of each rank; the first ends in the middle of a batch."""

BATCH = 2
NUM_STEPS = 20  # of an epoch: more than ranks promise with the first messages
EPOCHS = 2
BAD_ROWS = {"early": (0, 9), "late": (1, 36), "last": (0, 12)}
"""A rank and a row: while all have rows, when the others have none, and in the batch that its rank then repeats."""

scaled = {"inner": lambda: ks.LossScaling(problem.sgd_momentum(), "Backoff", {"scale_max": 8.0})}
windows, int8 = {"gradient_accumulation_steps": 4}, {"compression": ks.compression.Int8(block=16)}
skips = {"on_nonfinite": "skip"}
CASES = {
    "plain": {},
    "in windows": windows,
    "scaled, NaN early": scaled,
    "scaled in windows, NaN early": scaled | windows,
    "skips in windows, NaN late": skips | windows,
    "skips in windows, NaN last": skips | windows,
    "divided state": {"shard_state": True},
    "divided state, scaled in windows, NaN late": {"shard_state": True} | scaled | windows,
    "clipped": {"replica_clipnorm": problem.CLIPNORM},
    "clipped and scaled in windows, NaN late": {"replica_clipnorm": problem.CLIPNORM} | scaled | windows,
    "int8": int8,
    "int8 in windows with divided state": int8 | windows | {"shard_state": True},
    "int8 with divided state, scaled, NaN late": int8 | scaled | {"shard_state": True},
    "int4": {"compression": ks.compression.Int4(block=16)},
    "powersgd": {"compression": ks.compression.PowerSGD(rank=2, warmup_steps=0)},
    "powersgd in windows with divided state": {"compression": ks.compression.PowerSGD(rank=2, warmup_steps=0)}
    | windows
    | {"shard_state": True},
    "apart for 3 updates": {"sync_every": 3},
    "apart for 2 windows": {"sync_every": 2} | windows,
}

OF_TWO = {  # a power of two
    "in parts": {"virtual_replicas": 4},
    "in parts, skips, NaN early": {"virtual_replicas": 4} | skips,
    "in parts with divided state, scaled, NaN late": {"virtual_replicas": 4, "shard_state": True} | scaled,
}


def rows_of(rank, name):
    """A rank's own rows."""
    ends = np.cumsum([0, *NUM_ROWS])
    x, y = (array[ends[rank] : ends[rank + 1]].copy() for array in problem.data())
    for when, (owner, row) in BAD_ROWS.items():
        if name.endswith(f"NaN {when}") and rank == owner:
            x[row, 2] = np.nan
    return x, y


def trained(replicas, name):
    """Weights, logs and counts."""
    arguments = dict((CASES | OF_TWO)[name])
    model = problem.model()
    model.compile(ks.CrossShard(arguments.pop("inner", problem.sgd_momentum)(), **arguments), "mse")
    x, y = rows_of(replicas.replica_id, name)
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    counts = [model.optimizer.iterations, model.optimizer.skipped_steps]
    return {
        "weights": model.get_weights(),
        "loss": history.history["loss"],
        "counts": [int(keras.ops.convert_to_numpy(count)) for count in counts],
        "apart": replicas.largest_difference(model),
    }


def in_numpy(name, num_ranks=3):
    """The same in float64: step k has rows 2k and 2k + 1 of each rank that has them."""
    arguments = (CASES | OF_TWO)[name]
    everyones = [rows_of(rank, name) for rank in range(num_ranks)]
    steps = [
        [[array[BATCH * step : BATCH * (step + 1)] for array in own] for own in everyones] for step in range(NUM_STEPS)
    ]
    window, clipnorm = arguments.get("gradient_accumulation_steps", 1), arguments.get("replica_clipnorm")
    if "sync_every" in arguments:
        return apart(steps, arguments["sync_every"], window, EPOCHS)
    projected = Projected(arguments["compression"].rank) if name.startswith("powersgd") else None
    return of_parts(steps, window, clipnorm, EPOCHS, projected)


def loss_of_rows(weights, x, y):
    hidden = np.tanh(x @ weights[0] + weights[1])
    return np.mean((hidden @ weights[2] + weights[3] - y) ** 2, axis=1)


class Projected:
    """Sums of matrices that thin ones replace, and what each replica has not sent: PowerSGD."""

    def __init__(self, rank):
        shapes = [w.shape for w in problem.start_weights()]
        self.factors = {
            i: np.random.default_rng([0, i]).normal(size=(shape[1], rank)).astype("float32")
            for i, shape in enumerate(shapes)
            if len(shape) == 2
        }
        self.unsent = {i: np.zeros((len(NUM_ROWS), *shapes[i])) for i in self.factors}

    def sums(self, own):
        """The sums of all variables, from the gradients of each replica."""
        result = [np.sum(column, axis=0) for column in zip(*own)]
        for i, factor in self.factors.items():
            everyones = np.stack([grads[i] for grads in own]) + self.unsent[i]
            whole = everyones.sum(0)
            basis = np.linalg.qr(whole @ factor)[0]
            self.factors[i] = whole.T @ basis
            result[i] = basis @ self.factors[i].T
            self.unsent[i] = everyones - result[i] / len(own)
        return result


def apart(steps, every, window, epochs):
    """The mean weights of replicas that average them after each `every` updates of a window each."""
    number = len(NUM_ROWS)
    weights = [[w.astype("float64") for w in problem.start_weights()] for _ in range(number)]
    inner = [references.Momentum(0.1, 0.9) for _ in range(number)]
    losses, count = [], 0
    for _ in range(epochs):
        errors = []
        for first in range(0, len(steps), window):
            sums = [[np.zeros_like(w) for w in own] for own in weights]
            for parts in steps[first : first + window]:
                total = sum(len(x) for x, _ in parts)
                for replica, (x, y) in enumerate(parts):
                    if len(x):
                        x, y, share = x.astype("float64"), y.astype("float64"), number * len(x) / total / window
                        grads = problem.gradients_in_numpy(weights[replica], x, y)
                        sums[replica] = [sum_ + share * grad for sum_, grad in zip(sums[replica], grads)]
                        errors.append(loss_of_rows(weights[replica], x, y))
            for own, grads, optimizer in zip(weights, sums, inner):
                optimizer.update(own, grads)
            count += 1
            if count % every == 0:
                weights = [[np.mean(column, axis=0) for column in zip(*weights)] for _ in range(number)]
        losses.append(np.mean(np.concatenate(errors)))
    return {"weights": [np.mean(column, axis=0) for column in zip(*weights)], "loss": losses, "counts": [count, 0]}


def of_parts(steps, window=1, clipnorm=None, epochs=1, projected=None):
    """Weights, logs and counts in float64.

    Args:
        steps: of each micro-batch the `(x, y)` of each replica.
        window: how many micro-batches make an update.
        clipnorm: of the mean of a replica's own rows in a window.
        epochs: how often the steps are made.
        projected: the `Projected` that adds up gradients, if they are not sent whole.
    """
    weights, inner = [w.astype("float64") for w in problem.start_weights()], references.Momentum(0.1, 0.9)
    losses, counts = [], [0, 0]
    for _ in range(epochs):
        errors = []
        for first in range(0, len(steps), window):
            # Of each replica what it has added up in the window, by its rows.
            sums = [[np.zeros_like(w) for w in weights] for _ in steps[0]]
            shares = np.zeros(len(sums))
            for parts in steps[first : first + window]:
                total = sum(len(x) for x, _ in parts)
                for replica, (x, y) in enumerate(parts):
                    if not len(x):
                        continue
                    x, y, share = x.astype("float64"), y.astype("float64"), len(x) / total / window
                    shares[replica] += share
                    grads = problem.gradients_in_numpy(weights, x, y)
                    sums[replica] = [sum_ + share * grad for sum_, grad in zip(sums[replica], grads)]
                    errors.append(loss_of_rows(weights, x, y))
            if clipnorm is not None:
                sums = [references.clipped(own, clipnorm * share)[0] for own, share in zip(sums, shares) if share]
            reduced = [np.sum(column, axis=0) for column in zip(*sums)] if projected is None else projected.sums(sums)
            is_bad = not all(np.all(np.isfinite(grad)) for grad in reduced)
            counts[is_bad] += 1
            if not is_bad:
                inner.update(weights, reduced)
        losses.append(np.mean(np.concatenate(errors)))
    return {"weights": weights, "loss": losses, "counts": counts}
