"""Replicas that train apart for some updates, under `fit` and in NumPy."""

from __future__ import annotations

import tempfile
import warnings

import keras
import numpy as np
from promises.problems import uneven
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.data.whole_batches import rows_of_parts
from keras_shardopt.update.local_sgd import fragments_of

EPOCHS = 5
NUM_UPDATES = 20  # four batches in an epoch
RATE, MOMENTUM = 0.1, 0.9
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9

# The arguments of `CrossShard`, and the momentum inside it. "diloco" is for an outer optimizer.
CASES = {
    "every update": ({"sync_every": 1}, 0.0),
    "every 2": ({"sync_every": 2}, MOMENTUM),
    "every 5": ({"sync_every": 5}, MOMENTUM),
    "every 3": ({"sync_every": 3}, MOMENTUM),  # training ends in the middle of a round
    "every 2 diloco": ({"sync_every": 2, "diloco": True, "sync_warmup": 0}, MOMENTUM),
    "every 5 diloco": ({"sync_every": 5, "diloco": True, "sync_warmup": 5}, MOMENTUM),
    "every 5 in 3 fragments": ({"sync_every": 5, "diloco": True, "sync_fragments": 3, "sync_warmup": 3}, MOMENTUM),
}


def optimizer(name, **more):
    arguments, momentum = CASES[name]
    arguments = {**arguments, **more}
    if arguments.pop("diloco", False):
        arguments["outer_optimizer"] = keras.optimizers.SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    return ks.CrossShard(keras.optimizers.SGD(RATE, momentum=momentum), **arguments)


def compiled(replicas, made, metrics=()):
    """The model, prepared, which all processes give the same data."""
    model = problem.model()
    model.compile(made, "mse", metrics=list(metrics))
    return ks.prepare(model, auto_shard=True)


def trained(replicas, name):
    """Weights, history and counts after `fit` on uneven batches."""
    model = compiled(replicas, optimizer(name))
    x, y = uneven.data()
    history = model.fit(
        x, y, batch_size=uneven.BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=(x[:16], y[:16])
    )
    evaluated = model.evaluate(x[:16], y[:16], verbose=0)
    return {
        "weights": model.get_weights(),
        "val_loss": history.history["val_loss"],
        "evaluated": evaluated,
        "updates": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        "differ": replicas.largest_difference(model),
    }


def parts_of(batch, num_replicas):
    """The rows of each replica, as this backend divides them."""
    if keras.backend.backend() == "torch":
        ends = np.cumsum(rows_of_parts(len(batch), num_replicas))
    else:  # all but the last ones have as many
        ends = np.minimum(-(-len(batch) // num_replicas) * np.arange(1, num_replicas + 1), len(batch))
    return [batch[begin:end] for begin, end in zip([0, *ends], ends)]


def in_numpy(num_replicas, name):
    """The mean of the replicas' weights in float64: at the end, and at the end of each epoch."""
    arguments, momentum = CASES[name]
    every, warmup = arguments["sync_every"], arguments.get("sync_warmup", 0)
    start = [w.astype("float64") for w in problem.start_weights()]
    fragments = fragments_of([w.size for w in start], arguments.get("sync_fragments", 1))
    weights = [[w.copy() for w in start] for _ in range(num_replicas)]
    velocities = [[np.zeros_like(w) for w in start] for _ in range(num_replicas)]
    anchors, outer = [w.copy() for w in start], [np.zeros_like(w) for w in start]
    x, y = (array.astype("float64") for array in uneven.data())
    count, means = 0, []
    for _ in range(EPOCHS):
        for begin in range(0, len(x), uneven.BATCH_SIZE):
            batch = slice(begin, begin + uneven.BATCH_SIZE)
            parts = list(zip(parts_of(x[batch], num_replicas), parts_of(y[batch], num_replicas)))
            shares = [len(part) * num_replicas / len(x[batch]) for part, _ in parts]
            grads = [
                [share * g for g in problem.gradients_in_numpy(mine, *part)]
                if share
                else [np.zeros_like(w) for w in mine]
                for mine, part, share in zip(weights, parts, shares)
            ]
            if count < warmup:
                grads = [[np.mean(each, axis=0) for each in zip(*grads)]] * num_replicas
            for mine, velocity, theirs in zip(weights, velocities, grads):
                for i, grad in enumerate(theirs):
                    velocity[i] = momentum * velocity[i] - RATE * grad
                    mine[i] = mine[i] + velocity[i]
            count += 1
            if count <= warmup:
                anchors = [w.copy() for w in weights[0]]
                continue
            for number, positions in enumerate(fragments):
                first = (number + 1) * every // len(fragments)
                if count - warmup < first or (count - warmup - first) % every:
                    continue
                for i in positions:
                    moved = anchors[i] - np.mean([mine[i] for mine in weights], axis=0)
                    if arguments.get("diloco"):
                        outer[i] = OUTER_MOMENTUM * outer[i] - OUTER_RATE * moved
                        moved = OUTER_RATE * moved - OUTER_MOMENTUM * outer[i]
                    anchors[i] = anchors[i] - moved
                    for mine in weights:
                        mine[i] = anchors[i].copy()
        means.append([np.mean(each, axis=0) for each in zip(*weights)])
    return means


def state_of_all(model):
    """Each replica's weights and optimizer state, the anchors and counts, as arrays."""
    local = model.optimizer.local_updates
    shared = [keras.ops.convert_to_numpy(v) for v in [*local.lasting, *model.weights]]
    return [*map(np.array, local.states()), *shared]


def with_everything(use_ema=True, **more):
    """Adam with averages of weights inside, and an outer optimizer whose rounds end within epochs of four updates."""
    outer = keras.optimizers.SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    arguments = {"sync_every": 5, "sync_fragments": 2, "sync_warmup": 2, "outer_optimizer": outer, **more}
    return ks.CrossShard(keras.optimizers.Adam(0.01, use_ema=use_ema, ema_momentum=0.5), **arguments)


class Looking(keras.callbacks.Callback):
    """Evaluates, predicts and saves in the middle of epochs, and notes what it sees."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            x, y = uneven.data()
            loss = self.model.evaluate(x, y, verbose=0)
            self.model.predict(x, verbose=0)
            ks.save_weights(self.model, f"{self.folder}/looking.weights.h5")
            saved = problem.model()
            saved.load_weights(f"{self.folder}/looking.weights.h5")
            outputs = keras.ops.convert_to_numpy(saved(x))
            self.seen.append((loss, float(np.mean((outputs - y) ** 2))))


class Interrupting(keras.callbacks.Callback):
    """Ends training by an error in the third epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == 10:
            raise InterruptedError


def fitted(replicas, *callbacks, epochs=EPOCHS, **more):
    """The model after `fit`, from the same start and with the same random numbers."""
    keras.utils.set_random_seed(3)
    model = compiled(replicas, with_everything(**more))
    x, y = uneven.data()
    arguments = {"batch_size": uneven.BATCH_SIZE, "epochs": epochs, "shuffle": False, "verbose": 0}
    try:
        model.fit(x, y, callbacks=list(callbacks), **arguments)
    except InterruptedError:
        return None
    return model


def lived(replicas, name):
    """What becomes of replicas that train apart when somebody looks, saves, stops and goes on: by what is compared."""
    folder = processes.gather_objects(tempfile.mkdtemp())[0]
    if name == "whole":
        return state_of_all(fitted(replicas))
    if name == "without averages":  # which `fit` writes to the weights when it ends
        return state_of_all(fitted(replicas, use_ema=False))
    if name == "looked at":
        callback = Looking(folder)
        found = state_of_all(fitted(replicas, callback))
        return found, callback.seen
    if name == "killed":
        assert fitted(replicas, ks.callbacks.BackupAndRestore(folder), Interrupting()) is None
        return state_of_all(fitted(replicas, ks.callbacks.BackupAndRestore(folder)))
    if name == "in two calls":
        model = fitted(replicas, epochs=2, use_ema=False)
        x, y = uneven.data()
        model.fit(x, y, batch_size=uneven.BATCH_SIZE, epochs=EPOCHS - 2, shuffle=False, verbose=0)
        return state_of_all(model)
    if name == "from a file":
        model = fitted(replicas, epochs=3)  # ends within a round
        ks.save_model(model, f"{folder}/model.keras")
        loaded = keras.saving.load_model(f"{folder}/model.keras")
        kept, theirs = (
            [keras.ops.convert_to_numpy(v) for v in [*m.optimizer.local_updates.lasting, *m.weights]]
            for m in (model, loaded)
        )
        start = loaded.get_weights()
        x, y = uneven.data()
        ks.prepare(loaded, auto_shard=True)
        loaded.fit(x, y, batch_size=uneven.BATCH_SIZE, shuffle=False, verbose=0)
        return kept, theirs, start, loaded.get_weights(), replicas.largest_difference(loaded)
    assert name == "with other weights"
    model = fitted(replicas, epochs=2)
    model.set_weights(problem.start_weights())
    local = model.optimizer.local_updates
    x, y = uneven.data()
    model.fit(x[:16], y[:16], batch_size=16, epochs=1, verbose=0)
    return [keras.ops.convert_to_numpy(anchor) for anchor in local.anchors]


LIVES = ("whole", "without averages", "looked at", "killed", "in two calls", "from a file", "with other weights")


def with_nan(replicas, name):
    """Weights, counts and warnings where one row, which is the first replica's, is NaN in the third update."""
    x, y = (array.copy() for array in uneven.data())
    x[2 * uneven.BATCH_SIZE] = np.nan
    more = {"skip": {"on_nonfinite": "skip"}, "scaling": {}}.get(name, {})
    inner = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    inner = ks.LossScaling(inner, "Backoff", {"scale_max": 8.0}) if name == "scaling" else inner
    model = compiled(replicas, ks.CrossShard(inner, sync_every=2, **more))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=uneven.BATCH_SIZE, shuffle=False, verbose=0)
    optimizer = model.optimizer
    return {
        "weights": model.get_weights(),
        "left_out": int(keras.ops.convert_to_numpy(optimizer.local_updates.left_out)),
        "skipped": int(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(optimizer.skipped_steps))),
        "count": int(keras.ops.convert_to_numpy(optimizer.local_updates.count)),
        "warned": [str(each.message) for each in caught if "round" in str(each.message)],
    }


LARGE = 100 * 100 + 100 + 100 * 3 + 3


def sent(replicas, name):
    """PyTorch: what this rank gives to collectives in ten updates of a larger model."""
    import torch.distributed as dist

    made = ks.CrossShard("sgd") if name == "synchronous" else optimizer(name)
    layers = [keras.Input((100,)), keras.layers.Dense(100), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(made, "mse")
    ks.prepare(model, auto_shard=True)
    x, y = np.ones((16, 100), "float32"), np.ones((16, 3), "float32")
    model.fit(x, y, batch_size=16, verbose=0)  # what is compared and made equal once
    sizes = []
    names = ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "all_gather_single")

    def counting(collective, number):
        def call(*args, **kwargs):
            tensor = args[number]
            if hasattr(tensor, "numel"):
                sizes.append(tensor.numel() * tensor.element_size())
            return collective(*args, **kwargs)

        return call

    class Counting(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                for each in names:
                    if hasattr(dist, each):
                        setattr(dist, each, counting(getattr(dist, each), int(each != "all_reduce")))

        def on_train_batch_end(self, batch, logs=None):
            if batch == 9:
                vars(dist).update(before)

    before = {each: getattr(dist, each) for each in names if hasattr(dist, each)}
    if name != "synchronous":
        model.optimizer.local_updates.reset()
    x, y = np.repeat(x, 10, axis=0), np.repeat(y, 10, axis=0)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[Counting()])
    return {"reductions": [size for size in sizes if size > 1000], "bytes": sum(sizes)}
