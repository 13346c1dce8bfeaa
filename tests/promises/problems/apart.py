"""Replicas that train apart for some updates, under `fit` and in NumPy."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import tempfile
import warnings

import keras
import numpy as np
from promises.problems import uneven
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.data.whole_batches import rows_of_parts
from keras_shardopt.extensions.local_sgd.schedule import fragments_of
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates

EPOCHS = 5
NUM_UPDATES = 20  # four batches in an epoch
EPOCHS_OF_LIVES = 4
NUM_UPDATES_OF_LIVES = 4 * EPOCHS_OF_LIVES
RATE, MOMENTUM = 0.1, 0.9
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9

# Of these cases, training also has validation data.
VALIDATED = ("every 3", "every 5 in 3 fragments")
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


def local_of(model):
    """What keeps the replicas of a model apart."""
    (local,) = LocalUpdates.found_in([model.optimizer])
    return local


def compiled(replicas, made, model=None):
    """The model, prepared, which all processes give the same data."""
    model = problem.model() if model is None else model
    model.compile(made, "mse")
    return ks.prepare(model, auto_shard=True)


def normalizing():
    """One with moving statistics, which differ between replicas."""
    normalization, out = keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(problem.NUM_OUTPUTS)
    model = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), normalization, out])
    for variable, array in zip(out.weights, problem.start_weights()):
        variable.assign(array[..., : problem.NUM_OUTPUTS])
    return model


def trained(replicas, name):
    """Weights and counts after `fit` on uneven batches, and what validation says."""
    model = compiled(replicas, optimizer(name))
    (x, y), validates = uneven.data(), name in VALIDATED
    arguments = {"validation_data": (x[:16], y[:16])} if validates else {}
    arguments |= {"batch_size": uneven.BATCH_SIZE, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **arguments)
    return {
        "evaluated": model.evaluate(x[:16], y[:16], verbose=0) if validates else None,
        "val_loss": history.history.get("val_loss"),
        "weights": model.get_weights(),
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
    local = local_of(model)
    shared = [keras.ops.convert_to_numpy(v) for v in [*local.saved_variables, *model.weights]]
    return [*map(np.array, local.save_state()), *shared]


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
            saved = normalizing()
            saved.load_weights(f"{self.folder}/looking.weights.h5")
            outputs = keras.ops.convert_to_numpy(saved(x))
            self.seen.append((loss, float(np.mean((outputs - y) ** 2))))


class Interrupting(keras.callbacks.Callback):
    """Ends training by an error after so many updates, by default in the third epoch and within a round."""

    def __init__(self, count=10):
        super().__init__()
        self.count = count

    def on_train_batch_end(self, batch, logs=None):
        if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == self.count:
            raise InterruptedError


ARGUMENTS = {"batch_size": uneven.BATCH_SIZE, "shuffle": False, "verbose": 0}


def fitted(replicas, *callbacks, epochs=EPOCHS_OF_LIVES, **more):
    """The model after `fit`, perhaps interrupted, from the same start and with the same random numbers."""
    keras.utils.set_random_seed(3)
    model = compiled(replicas, with_everything(**more), normalizing())
    with contextlib.suppress(InterruptedError):
        model.fit(*uneven.data(), callbacks=list(callbacks), epochs=epochs, **ARGUMENTS)
    return model


def lived(replicas, name):
    """What becomes of replicas that train apart when somebody looks, saves, stops and goes on: by what is compared."""
    folder = processes.gather_objects(tempfile.mkdtemp())[0]
    x, y = uneven.data()
    if name == "whole":  # and then written to a file, within a round
        model = fitted(replicas)
        return state_of_all(model), _from_a_file(replicas, model, f"{folder}/model.keras")
    if name == "without averages":  # which `fit` writes to the weights when it ends
        return state_of_all(fitted(replicas, use_ema=False))
    if name == "looked at and killed":
        looking, killing = Looking(folder), Interrupting()
        killed = fitted(replicas, ks.callbacks.BackupAndRestore(folder), looking, killing)
        assert int(keras.ops.convert_to_numpy(killed.optimizer.iterations)) == killing.count
        return state_of_all(fitted(replicas, ks.callbacks.BackupAndRestore(folder))), looking.seen
    if name in ("in two calls", "with other statistics"):
        model = fitted(replicas, epochs=2, use_ema=False)
        if name == "with other statistics":
            model.layers[0].moving_mean.assign(np.full(problem.NUM_FEATURES, 5.0))
        model.fit(x, y, epochs=EPOCHS_OF_LIVES - 2, **ARGUMENTS)
        return state_of_all(model)
    assert name == "interrupted"  # in the third epoch, within a round, and nobody looks before the next call
    model, begin = fitted(replicas, Interrupting(), use_ema=False), 2 * uneven.BATCH_SIZE
    model.fit(x[begin:], y[begin:], **ARGUMENTS)
    model.fit(x, y, epochs=EPOCHS_OF_LIVES - 3, **ARGUMENTS)
    found = state_of_all(model)
    later = Interrupting(NUM_UPDATES_OF_LIVES + 3)
    with contextlib.suppress(InterruptedError):
        model.fit(x, y, callbacks=[later], **ARGUMENTS)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == later.count
    interrupted = _with_other_weights(model)
    model.fit(x, y, epochs=2, **ARGUMENTS)
    return found, {"when interrupted": interrupted, "after a call": _with_other_weights(model)}


def _from_a_file(replicas, model, path):
    """What a file has, what a model has that is loaded from it, which then trains on; and the file."""
    ks.save_model(model, path)
    file = pathlib.Path(path).read_bytes()
    loaded = keras.saving.load_model(path)
    kept, theirs = (
        [keras.ops.convert_to_numpy(v) for v in [*local_of(m).saved_variables, *m.weights]] for m in (model, loaded)
    )
    start = loaded.get_weights()
    ks.prepare(loaded, auto_shard=True)
    loaded.fit(*uneven.data(), **ARGUMENTS)
    return kept, theirs, start, loaded.get_weights(), replicas.largest_difference(loaded), file


def _with_other_weights(model):
    """The weights from which rounds begin after an update, and those that the model was given before it."""
    fresh = normalizing()
    model.set_weights(fresh.get_weights())
    x, y = uneven.data()
    model.fit(x[:16], y[:16], **ARGUMENTS)
    pairs = local_of(model).sync.references, fresh.trainable_variables
    return [[keras.ops.convert_to_numpy(v) for v in variables] for variables in pairs]


LIVES = (
    "whole",
    "without averages",
    "looked at and killed",
    "in two calls",
    "with other statistics",
    "interrupted",
)


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
    optimizer, weights = model.optimizer, model.get_weights()
    clean, rows = uneven.data()
    left_out = int(keras.ops.convert_to_numpy(local_of(model).sync.num_skipped))
    model.fit(clean, rows, batch_size=uneven.BATCH_SIZE, shuffle=False, verbose=0)
    return {
        "weights": weights,
        "later": model.get_weights(),
        "left_out": left_out,
        "left_out_later": int(keras.ops.convert_to_numpy(local_of(model).sync.num_skipped)),
        "skipped": int(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(optimizer.skipped_steps))),
        "count": int(keras.ops.convert_to_numpy(local_of(model).schedule.count)),
        "differ": replicas.largest_difference(model),
        "warned": [str(each.message) for each in caught if "sync step" in str(each.message)],
    }


LARGE = 100 * 100 + 100 + 100 * 3 + 3


def large(name, **more):
    """A model of so many weights, which has been trained once, so that all is equal and built; and ten batches."""
    made = ks.CrossShard("sgd") if name == "synchronous" else optimizer(name)
    layers = [keras.Input((100,)), keras.layers.Dense(100), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(made, "mse", **more)
    ks.prepare(model, auto_shard=True)
    x, y = np.full((160, 100), 0.01, "float32"), np.ones((160, 3), "float32")
    model.fit(x[:16], y[:16], batch_size=16, verbose=0)
    if name != "synchronous":
        local_of(model).reset()
    return model, x, y


class Counting(keras.callbacks.Callback):
    """While the ten batches run, notes what is given to functions of a module or class, in bytes."""

    def __init__(self, owner, names, size_of):
        super().__init__()
        self.owner, self.size_of = owner, size_of
        self.before = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
        self.sizes = []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            for name, function in self.before.items():
                setattr(self.owner, name, self._counting(name, function))

    def on_train_batch_end(self, batch, logs=None):
        if batch == 9:
            for name, function in self.before.items():
                setattr(self.owner, name, function)

    def _counting(self, name, function):
        def call(*args, **kwargs):
            size = self.size_of(name, args)
            if size:
                self.sizes.append(size)
            return function(*args, **kwargs)

        return call


def sent(replicas, name):
    """What each replica gives to collectives in ten updates, where Python runs in each of them."""
    if keras.backend.backend() == "torch":
        import torch.distributed as owner

        names = ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "all_gather_single")
        model, x, y = large(name)

        def size_of(function, args):
            tensor = args[int(function != "all_reduce")]
            return tensor.numel() * tensor.element_size() if hasattr(tensor, "numel") else 0
    else:
        from tensorflow.python.distribute.cross_device_ops import CrossDeviceOps as owner

        names = ("reduce", "batch_reduce", "_gather")
        model, x, y = large(name, run_eagerly=True)

        def size_of(function, args):
            given = {"reduce": lambda: [args[2]], "batch_reduce": lambda: [v for v, _ in args[2]]}
            values = given.get(function, lambda: [args[1]])()
            tensors = [getattr(value, "values", [value])[0] for value in values]
            return sum(int(np.prod(tensor.shape)) * tensor.dtype.size for tensor in tensors)

    counting = Counting(owner, names, size_of)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[counting])
    sizes = counting.sizes
    return {"reductions": [size for size in sizes if size > 1000], "bytes": sum(sizes)}


# Arguments of `CrossShard`, and of what part of one all-reduce of float32 an update's mean share is.
REPORTED = {
    "every 5": ({"sync_every": 5}, 1 / 5),
    "fragments": ({"sync_every": 4, "sync_fragments": 2}, 1 / 4),
    "longer and longer": ({"sync_every": lambda count: 2 + count // 2, "sync_warmup": 2}, 1 / 6),
    "in bfloat16": ({"sync_every": 5, "compression": "bfloat16"}, 1 / 10),
    "averages": ({"sync_every": 5}, 2 / 5),
    "warm-up": ({"sync_every": 5, "sync_warmup": 50}, 1),
}


def reported(replicas, name):
    """What `communication_report` says after ten updates."""
    inner = keras.optimizers.SGD(RATE, use_ema=name == "averages")
    layers = [keras.Input((100,)), keras.layers.Dense(100), keras.layers.Dense(3)]
    model = compiled(replicas, ks.CrossShard(inner, **REPORTED[name][0]), keras.Sequential(layers))
    x, y = np.full((160, 100), 0.01, "float32"), np.ones((160, 3), "float32")
    model.fit(x, y, batch_size=16, verbose=0)
    report = model.optimizer.communication_report()
    return {"ratio": report.ratio, "number": len(report.collectives), "updates": report.num_updates}


def compiled_collectives(name):
    """JAX: the bytes of the collectives in the compiled step: of those that always run, and of those in conditions."""
    import jax

    model, x, y = large(name)
    kinds = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(kinds, True))
    layout = keras.distribution.distribution().get_data_layout
    data = [jax.device_put(array[:16], layout(array.shape).backend_layout) for array in (x, y)]
    text = jax.jit(model.train_step).lower(state, data).compile().as_text()
    found, conditional, calls, where = {}, set(), {}, None
    for line in text.splitlines():
        if line.rstrip().endswith("{") and not line.startswith(" "):
            where = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line).group(1)
            found[where], calls[where] = [], set()
        operation = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if operation:
            shapes = re.findall(r"(?:f32|s32|u32)\[([\d,]*)\]", operation.group(1))
            found[where].append(sum(4 * int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes))
        branches = re.search(r"branch_computations=\{(.*?)\}", line)
        if branches:
            conditional |= {each.strip(" %") for each in branches.group(1).split(",")}
        if where is not None:
            calls[where] |= set(re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line))
    inside = set()
    while conditional - inside:
        inside |= conditional
        conditional = inside | {each for name in inside for each in calls.get(name, ())}
    always = [size for name, sizes in found.items() if name not in inside for size in sizes]
    return always, [size for name in inside for size in found.get(name, [])]


COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def normalized(replicas, name):
    """Moving statistics of the inputs, which no weight has a part in, after each batch and after `fit`."""
    every, window = NORMALIZED[name]
    layers = [
        keras.Input((problem.NUM_FEATURES,)),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(problem.NUM_OUTPUTS),
    ]
    model = keras.Sequential(layers)
    arguments = {"sync_every": every, "gradient_accumulation_steps": window}
    model.compile(ks.CrossShard(keras.optimizers.SGD(0.01, momentum=MOMENTUM), **arguments), "mse")
    ks.prepare(model, auto_shard=True)
    x, y = uneven.data()
    seen = []

    class Evaluating(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(x, y, batch_size=NUM_ROWS, verbose=0)
            seen.append(statistics())

    def statistics():
        batches = model.layers[0]
        return [keras.ops.convert_to_numpy(v).copy() for v in (batches.moving_mean, batches.moving_variance)]

    model.fit(x[:FEW], y[:FEW], batch_size=16, shuffle=False, verbose=0, callbacks=[Evaluating()])
    seen.append(statistics())
    each = _statistics_of_each(model)
    # Set between two fits, perhaps in the middle of a round.
    model.layers[0].moving_mean.assign(np.full(problem.NUM_FEATURES, 5.0))
    model.fit(x[:16], y[:16], batch_size=16, shuffle=False, verbose=0)
    return {"seen": seen, "each": each, "set": statistics()[0], "differ": replicas.largest_difference(model)}


def _statistics_of_each(model):
    """Each replica's moving statistics."""
    local = local_of(model)
    states = dict(zip(map(id, local.variables.everything()), local.save_state()[2:]))
    return list(zip(*(states[id(v)] for v in local.variables.statistics)))


# How many updates a round has, and an update batches.
NORMALIZED = {"2": (2, None), "50": (50, None), "2 windows": (2, 2)}
FEW = 49  # one replica has no row of the last batch, after which there is a round
NUM_ROWS = uneven.NUM_ROWS


class Rounds(keras.callbacks.Callback):
    """Notes after each update whether all replicas have the same weights, bit for bit."""

    def __init__(self):
        super().__init__()
        self.equal = []

    def on_train_batch_end(self, batch, logs=None):
        state = local_of(self.model).save_state()
        weights = state[2 : 2 + len(self.model.trainable_variables)]
        self.equal.append(all(np.array_equal(rows[0], row) for rows in weights for row in rows[1:]))


def _sgd(**more):
    return keras.optimizers.SGD(0.02, momentum=MOMENTUM, **more)


def _several():
    """Two base optimizers, each with averages of its own weights."""
    kernels, others = _sgd(use_ema=True, ema_momentum=0.5), _sgd(use_ema=True, ema_momentum=0.2)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(others, {".*/kernel": kernels}))


# What is inside `CrossShard`, its other arguments, and how near a twin comes that knows nothing of compression.
COMBINED = {
    "averages": (lambda: _sgd(use_ema=True, ema_momentum=0.5), {}, 1e-5),
    "averages of several": (_several, {}, 1e-5),
    "int8": (_sgd, {"compression": "int8"}, 2e-2),
    "clipping": (lambda: _sgd(global_clipnorm=0.3), {}, 1e-5),
    "frozen": (_sgd, {}, 1e-5),
    "embedding": (_sgd, {}, 1e-5),
    "half precision": (lambda: ks.MixedPrecision(_sgd()), {}, 0.1),
    "accumulation": (_sgd, {"gradient_accumulation_steps": 2}, 1e-5),
    "loss scaling": (lambda: ks.LossScaling(_sgd(), 64.0), {}, 1e-5),
    "longer and longer": (_sgd, {"sync_every": lambda count: 1 + count // 3}, 1e-5),
    "bfloat16": (_sgd, {"compression": "bfloat16"}, 2e-2),
    "int4": (_sgd, {"compression": "int4"}, 0.3),
    "powersgd": (_sgd, {"compression": ks.compression.PowerSGD(rank=2, warmup_steps=0)}, 0.3),
}
if not hasattr(keras.optimizers, "MultiOptimizer"):  # before Keras 3.15
    del COMBINED["averages of several"]


def layered(name):
    """A model for one of these cases, and data of which all replicas have equally many rows."""
    keras.utils.set_random_seed(3)
    x, y = problem.data(num_steps=12)
    dtype = "bfloat16" if name == "half precision" else "float32"
    layers = [
        keras.layers.Dense(8, activation="tanh", dtype=dtype),
        keras.layers.Dense(problem.NUM_OUTPUTS, dtype=dtype),
    ]
    if name == "embedding":
        x = (np.abs(x) * 10).astype("int32") % 20
        layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), *layers]
    if name == "frozen":
        layers.insert(1, keras.layers.Dense(8, trainable=False))
    return keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype.name), *layers]), x, y


def combined(replicas, name):
    """What becomes of the weights, what is seen of them, and when all replicas have the same."""
    inner, more, _ = COMBINED[name]
    model, x, y = layered(name)
    model.compile(ks.CrossShard(inner(), **{"sync_every": 3, **more}), "mse")
    ks.prepare(model, auto_shard=True)
    rounds = Rounds()
    arguments = {"batch_size": problem.BATCH_SIZE, "shuffle": False, "verbose": 0, "callbacks": [rounds]}
    model.fit(x, y, epochs=2, **arguments)
    outputs = model.predict(x, verbose=0)
    return {
        "weights": [weight.astype("float32") for weight in model.get_weights()],
        "start": [weight.astype("float32") for weight in layered(name)[0].get_weights()],
        "evaluated": model.evaluate(x, y, verbose=0),
        "predicted": np.mean((outputs.astype("float32") - y) ** 2),
        "equal": rounds.equal,
        "differ": replicas.largest_difference(model),
    }


def twins(num_replicas, name):
    """The same with as many models in one process, whose weights NumPy joins: the mean, and when all are equal."""
    inner, more, _ = COMBINED[name]
    every = more.get("sync_every", lambda count: 3)
    steps = more.get("gradient_accumulation_steps", 1)
    models = []
    for _ in range(num_replicas):
        model, x, y = layered(name)
        made = inner()
        if steps > 1:
            made = type(made).from_config(made.get_config() | {"gradient_accumulation_steps": steps})
        model.compile(made, "mse", jit_compile=keras.backend.backend() == "jax")
        models.append(model)
    since, joined = 0, []
    num_batches = 2 * len(x) // problem.BATCH_SIZE
    for batch in range(num_batches):
        begin = batch * problem.BATCH_SIZE % len(x)
        parts = np.split(np.arange(begin, begin + problem.BATCH_SIZE), num_replicas)
        for model, rows in zip(models, parts):
            model.train_on_batch(x[rows], y[rows])
        count = (batch + 1) // steps
        if (batch + 1) % steps == 0 and count - since >= every(since):
            since = count
            for each in zip(*map(_joined, models)):
                mean = _mean(each)
                for variable in each:
                    variable.assign(mean)
            for model in models:
                if name == "half precision":
                    for variable, master in zip(model.trainable_variables, _masters(model)):
                        variable.assign(keras.ops.cast(master, variable.dtype))
        if count == since:
            joined.append(batch)
    if name.startswith("averages"):  # which `fit` writes to the weights in the end
        return [_mean(each) for each in zip(*map(_averages, models))], joined
    return [_mean(each) for each in zip(*(model.weights for model in models))], joined


def _masters(model):
    return [model.optimizer._variables_inside([v])[0] for v in model.trainable_variables]


def _joined(model):
    weights = _masters(model) if isinstance(model.optimizer, ks.MixedPrecision) else model.trainable_variables
    return [*weights, *_averages(model)]


def _averages(model):
    """The averages that the base optimizers keep, in the order of the model's weights."""
    leaves = [leaf for leaf in getattr(model.optimizer, "optimizers", [model.optimizer]) if leaf.use_ema]
    kept = [zip(map(id, leaf._trainable_variables), leaf._model_variables_moving_average) for leaf in leaves]
    by_weight = dict(itertools.chain(*kept))
    return [by_weight[id(v)] for v in model.trainable_variables if id(v) in by_weight]


def _mean(variables):
    return np.mean([keras.ops.convert_to_numpy(v).astype("float64") for v in variables], axis=0).astype("float32")


def dropping(replicas, name):
    """Each replica's weights after an update on equal rows, of which dropout leaves other elements."""
    layers = [keras.Input((32,)), keras.layers.Dropout(0.5, seed=5), keras.layers.Dense(1, use_bias=False)]
    model = compiled(replicas, ks.CrossShard(keras.optimizers.SGD(0.1), sync_every=2), keras.Sequential(layers))
    model.fit(np.ones((2, 32), "float32"), np.full((2, 1), 3.0, "float32"), batch_size=2, verbose=0)
    return local_of(model).save_state()[2]


def moved(replicas, name):
    """A file of a run that was amid a round, at this path, loaded by so many replicas: what it has, and training on."""
    loaded = keras.saving.load_model(name)
    own = local_of(loaded).saved_variables
    kept = [keras.ops.convert_to_numpy(v) for v in [*own, *loaded.weights]]
    x, y = uneven.data()
    before = loaded.evaluate(x, y, verbose=0)
    ks.prepare(loaded, auto_shard=True)
    loaded.fit(x, y, batch_size=uneven.BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    after = loaded.evaluate(x, y, verbose=0)
    return {"kept": kept, "losses": (before, after), "differ": replicas.largest_difference(loaded)}


def _scaling(**more):
    return ks.LossScaling(_sgd(**more), "Backoff", {"scale_max": 1024.0, "step_window": 50})


# What is inside `CrossShard`, and its other arguments, where replicas leave out updates.
SKIPPING = {
    "skip": (_sgd, {"on_nonfinite": "skip"}),
    "scaling": (_scaling, {}),
    "accumulation": (_sgd, {"on_nonfinite": "skip", "gradient_accumulation_steps": 2}),
    "scaling, statistics and accumulation": (_scaling, {"on_nonfinite": "skip", "gradient_accumulation_steps": 2}),
    "clipping": (lambda: ks.GradientClipping(_sgd(), 0.3), {"on_nonfinite": "skip"}),
    "averages": (lambda: _sgd(use_ema=True, ema_momentum=0.5), {"on_nonfinite": "skip"}),
    "statistics": (_sgd, {"on_nonfinite": "skip"}),
    "statistics and accumulation": (_sgd, {"on_nonfinite": "skip", "gradient_accumulation_steps": 2}),
    "statistics before a round": (_sgd, {"on_nonfinite": "skip"}),  # whose statistics do not count in it
    "averages and uneven statistics": (lambda: _sgd(use_ema=True, ema_momentum=0.5), {"on_nonfinite": "skip"}),
    "all replicas": (_sgd, {"on_nonfinite": "skip"}),
}
NUM_MICRO = 13
BAD = ((3, 1), (6, 1), (9, 0))  # batches, none of them before a round, and replicas of which one row is NaN


def left_out(name):
    """A model for one of these cases, with moving statistics or uneven batches, and how many rows a batch has."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(problem.NUM_OUTPUTS)]
    if "statistics" in name:
        layers.insert(1, keras.layers.BatchNormalization(momentum=0.5))
    size = 16 if "statistics" in name and "uneven" not in name else 15
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers]), size


def rows_with_nan(name, size):
    """The batches of two replicas."""
    x, y = (array[: NUM_MICRO * size].copy() for array in problem.data(num_steps=NUM_MICRO))
    for batch, replica in bad_in(name):
        of = y if "before" in name else x  # statistics of the inputs are finite then
        of[parts_of(np.arange(batch * size, (batch + 1) * size), 2)[replica][2]] = np.nan
    return x, y


def bad_in(name):
    return {"all replicas": [(3, 0), (3, 1)], "statistics before a round": [(2, 1), (11, 1)]}.get(name, BAD)


def skipping(replicas, name):
    """The mean of weights and statistics, and each replica's counters and scale, after updates that some left out."""
    inner, more = SKIPPING[name]
    layers, size = left_out(name)
    model = compiled(replicas, ks.CrossShard(inner(), sync_every=3, **more), layers)
    x, y = rows_with_nan(name, size)
    model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    local = local_of(model)
    states = dict(zip(map(id, local.variables.everything()), local.save_state()[2:]))
    optimizer = model.optimizer
    counted = int(keras.ops.convert_to_numpy(optimizer.skipped_steps))
    return {
        "weights": model.get_weights(),
        "start": left_out(name)[0].get_weights(),
        "iterations": states[id(optimizer.iterations)].tolist(),
        "skipped": states[id(optimizer.skipped_steps)].tolist(),
        "scale": states[id(optimizer.loss_scale)].tolist() if "scaling" in name else None,
        "counted": processes.gather_objects(counted),
        "statistics": _statistics_of_each(model),
        "left_out": int(keras.ops.convert_to_numpy(local.sync.num_skipped)),
        "count": int(keras.ops.convert_to_numpy(local.schedule.count)),
        "differ": replicas.largest_difference(model),
    }


def skipping_twins(name):
    """The same of models in one process, each with an optimizer that skips for itself, whose weights NumPy joins."""
    inner, more = SKIPPING[name]
    steps = more.get("gradient_accumulation_steps", 1)
    models, (size, _) = zip(*(left_out(name) for _ in range(2)))
    for model in models:
        model.compile(ks.CrossShard(inner(), **more), "mse", run_eagerly=keras.backend.backend() == "tensorflow")
    x, y = rows_with_nan(name, size)
    for batch in range(NUM_MICRO):
        for model, rows in zip(models, parts_of(np.arange(batch * size, (batch + 1) * size), 2)):
            share = np.full(len(rows), len(rows) * 2 / size, "float32")
            model.train_on_batch(x[rows], y[rows], share)
        if (batch + 1) % (3 * steps) == 0:
            counting = [model for i, model in enumerate(models) if (batch, i) not in bad_in(name)]
            kinds = [_statistics(counting), zip(*map(_weights_and_averages, models))]
            for each in [each for kind in kinds for each in kind]:
                mean = _mean(each)
                for variable in each:
                    variable.assign(mean)
    of_each = [keras.ops.convert_to_numpy(model.optimizer.iterations).item() for model in models]
    skips = [int(keras.ops.convert_to_numpy(model.optimizer.skipped_steps)) for model in models]
    scales = [float(keras.ops.convert_to_numpy(model.optimizer.loss_scale)) for model in models]
    weights = [_mean(each) for each in zip(*(model.weights for model in models))]
    if "averages" in name:
        leaves = [model.optimizer.inner for model in models]
        for i, each in enumerate(zip(*(leaf._model_variables_moving_average for leaf in leaves))):
            place = next(j for j, v in enumerate(models[0].weights) if v is models[0].trainable_variables[i])
            weights[place] = _mean(each)
    statistics = [[keras.ops.convert_to_numpy(v) for v in model.non_trainable_variables] for model in models]
    return {"weights": weights, "iterations": of_each, "skipped": skips, "scale": scales, "statistics": statistics}


def _weights_and_averages(model):
    leaf = model.optimizer.inner
    averages = leaf._model_variables_moving_average if getattr(leaf, "use_ema", False) else []
    return [*model.trainable_variables, *averages]


def _statistics(models):
    return zip(*(model.non_trainable_variables for model in models))


def seeds(replicas, name):
    """Each replica's state of a dropout layer, of which one has left out an update."""
    layers = [keras.Input((problem.NUM_FEATURES,)), keras.layers.Dropout(0.5, seed=5), keras.layers.Dense(3)]
    optimizer = ks.CrossShard(_sgd(), sync_every=3, on_nonfinite="skip")
    model = compiled(replicas, optimizer, keras.Sequential(layers))
    x, y = rows_with_nan(name, 16)
    model.fit(x[:64], y[:64], batch_size=16, shuffle=False, verbose=0)
    local = local_of(model)
    names = [v.name for v in local.variables.everything()]
    return local.save_state()[2 + names.index("seed_generator_state")]


# TensorFlow and JAX: what is inside `CrossShard`, its other arguments, and what the error says.
REFUSED = {
    "loss scaling of Keras": (
        lambda: keras.optimizers.LossScaleOptimizer(_sgd()),
        {},
        "Use `keras_shardopt.LossScaling`",
    ),
}
if keras.backend.backend() == "tensorflow":
    REFUSED |= {"powersgd": (_sgd, {"compression": "powersgd"}, "must have `warmup_steps=0`")}


def refused(replicas, name):
    """Trains, or fails to."""
    inner, more, _ = REFUSED[name]
    model = compiled(replicas, ks.CrossShard(inner(), sync_every=2, **more))
    x, y = uneven.data()
    model.fit(x[:16], y[:16], batch_size=16, verbose=0)
