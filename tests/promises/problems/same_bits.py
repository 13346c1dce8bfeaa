"""What is trained with virtual replicas on any number of replicas, to end with equal bits."""

import functools
import hashlib

import keras
import numpy as np

import keras_shardopt as ks
from keras_shardopt.backends.models import buffers_of

NUM_PARTS = 8
ROWS, BATCH_SIZE = 54, 24  # the last batch has fewer rows than there are parts

layers = keras.layers


def normalizing():
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(16, activation="gelu"),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(3),
        ]
    )


def attending():
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, activation="relu")(inputs)
    x = layers.Reshape((16, -1))(layers.Conv2D(8, 3, strides=2, activation="gelu")(x))
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.Dropout(0.2)(layers.Flatten()(x))  # with the backend's own generator, where it has one
    x = layers.GaussianNoise(0.1, seed=4)(layers.Dense(8)(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def dropping():
    """Small, with moving statistics and random numbers: what a restart has to bring back."""
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.GaussianNoise(0.1, seed=4),
            layers.Dense(3),
        ]
    )


def recurrent():
    return keras.Sequential(
        [keras.Input((7,), dtype="int32"), layers.Embedding(50, 8), layers.GRU(12), layers.Dense(3)]
    )


def masked():
    inputs = keras.Input((7,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(50, 8, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(3)(x))


def paired():
    """Of two outputs, of which one has a mask; with weights, losses of both divide by what all parts have."""
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(50, 8, mask_zero=True)(inputs)
    whole = layers.Dense(3, name="whole")(layers.Flatten()(layers.Dense(4)(layers.Embedding(50, 3)(inputs))))
    return keras.Model(
        inputs, {"tokens": layers.Dense(3, name="tokens")(layers.LSTM(8, return_sequences=True)(x)), "whole": whole}
    )


def constrained():
    """Whose first layers change their weights in the forward pass, also one that is frozen."""
    frozen, trained = (layers.SpectralNormalization(layers.Dense(size)) for size in (7, 32))
    model = keras.Sequential([keras.Input((12,)), frozen, trained, layers.Dense(3)])
    frozen.trainable = False
    return model


class Bounded(layers.Dense):
    """Does not let the norm of its kernel fall below a limit, which it reaches after some batches."""

    def build(self, shape):
        super().build(shape)
        self.limit = 0.9989 * float(keras.ops.norm(keras.ops.stop_gradient(self.kernel)))

    def call(self, x, training=None):
        norm = float(keras.ops.norm(keras.ops.stop_gradient(self.kernel)))
        if training and norm < self.limit:
            self.kernel.assign(self.kernel * (self.limit / norm))
        return super().call(x)


def bounded():
    """Whose first layer changes its weights in the forward pass, but not yet in the first batch. For PyTorch."""
    return keras.Sequential([keras.Input((12,)), Bounded(32, activation="relu"), layers.Dense(3)])


def wrapped():
    """Of PyTorch's modules, whose state is in buffers: statistics, a counter, a mask, and one that is made anew."""
    torch = __import__("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(12, 16), torch.nn.Linear(16, 3)
            self.norm = torch.nn.BatchNorm1d(8, momentum=None)  # by its counter
            self.register_buffer("mask", torch.full((16, 16), -np.inf).triu(1), persistent=False)
            self.register_buffer("range", torch.ones(16))

        def forward(self, x):
            x = self.norm(self.first(x).reshape(-1, 8, 2)).reshape(-1, 16) / self.range
            if self.training:
                self.range = 0.9 * self.range + 0.1 * (1 + x.detach().abs().amax(0))
            return self.last((x @ torch.softmax(self.mask, -1)).relu())

    torch.manual_seed(5)
    return keras.Sequential([keras.Input((12,)), layers.TorchModuleWrapper(Net(), output_shape=(None, 3))])


NETS = {
    "normalizing": normalizing,
    "attending": attending,
    "dropping": dropping,
    "recurrent": recurrent,
    "masked": masked,
    "paired": paired,
    "constrained": constrained,
    "bounded": bounded,
    "wrapped": wrapped,
}

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
}

OPTIONS = {
    "plain": {},
    "clipped": {"replica_clipnorm": 0.1, "on_nonfinite": "skip"},
    "accumulated": {"gradient_accumulation_steps": 2, "on_nonfinite": "skip"},
    "divided": {"shard_state": True},
    "summed": {"reduction": "sum"},
    "skipped": {"on_nonfinite": "skip"},
    "weighted": {},  # by the sum of weights
}

CASES = [
    *[
        f"{net}-{optimizer}-plain"
        for net in NETS
        for optimizer in OPTIMIZERS
        if net not in ("dropping", "paired", "constrained", "bounded", "wrapped")
    ],
    "constrained-SGD-plain",
    *[f"normalizing-SGD-{options}" for options in OPTIONS if options not in ("plain", "weighted")],
    "normalizing-Adam-divided",
    "masked-SGD-clipped",
    "recurrent-SGD-weighted",
    "paired-SGD-weighted",
]


def model_of(case, **more):
    """A compiled model of a case `net-optimizer-options`; to be called in a scope of `data_parallel`."""
    net, optimizer, options = case.split("-")
    keras.utils.set_random_seed(5)
    model = NETS[net]()
    reduction = "mean_with_sample_weight" if options == "weighted" else "sum_over_batch_size"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    inner = OPTIMIZERS[optimizer]()
    if options == "clipped":
        inner = ks.LossScaling(ks.GradientClipping(inner, 1.0))
    chosen = {"virtual_replicas": NUM_PARTS, **OPTIONS[options], **more}
    if net == "paired":
        each = {"tokens": loss, "whole": keras.losses.SparseCategoricalCrossentropy.from_config(loss.get_config())}
        model.compile(ks.CrossShard(inner, **chosen), each)
        return model
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.compile(ks.CrossShard(inner, **chosen), loss, metrics=["accuracy"], weighted_metrics=[accuracy])
    return model


def data_of(case):
    net = case.partition("-")[0]
    random = np.random.RandomState(3)
    x = {
        "normalizing": lambda: random.randn(ROWS, 12).astype("float32"),
        "dropping": lambda: random.randn(ROWS, 12).astype("float32"),
        "constrained": lambda: random.randn(ROWS, 12).astype("float32"),
        "bounded": lambda: random.randn(ROWS, 12).astype("float32"),
        "wrapped": lambda: random.randn(ROWS, 12).astype("float32"),
        "attending": lambda: random.randn(ROWS, 12, 12, 3).astype("float32"),
        "recurrent": lambda: random.randint(0, 50, (ROWS, 7)),
        "masked": lambda: random.randint(1, 50, (ROWS, 7)) * (np.arange(7) < random.randint(1, 8, (ROWS, 1))),
        "paired": lambda: random.randint(1, 50, (ROWS, 7)) * (np.arange(7) < random.randint(1, 8, (ROWS, 1))),
    }[net]()
    if case.endswith("skipped"):
        x[30, 2] = np.nan  # in the gradients of one part
    if net == "paired":
        shapes = {"tokens": (ROWS, 7), "whole": (ROWS,)}
        y = {name: random.randint(0, 3, shape) for name, shape in shapes.items()}
        return x, y, {name: random.rand(*shape).astype("float32") + 0.5 for name, shape in shapes.items()}
    shape = (ROWS, 7) if net == "masked" else (ROWS,)
    return x, random.randint(0, 3, shape), random.rand(*shape).astype("float32") + 0.5


def fit(model, case, epochs=2, **more):
    """The logs of training with uneven batches, sample weights and validation data."""
    x, y, weights = data_of(case)
    validation = keras.tree.map_structure(lambda values: values[:19], (x, y))
    arguments = {"batch_size": BATCH_SIZE, "epochs": epochs, "verbose": 0, "validation_data": validation, **more}
    return model.fit(x, y, sample_weight=weights, **arguments).history


def moving_statistics():
    """What a normalization has after six rows in eight parts, and what the parts that have a row make of it."""
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])
    model.compile(ks.CrossShard(keras.optimizers.SGD(0.0), virtual_replicas=NUM_PARTS), "mse")
    x = np.random.RandomState(1).randn(6, 3).astype("float32")
    model.train_on_batch(x, np.zeros((6, 1), "float32"))
    normalization = model.layers[0]
    found = [keras.ops.convert_to_numpy(v) for v in (normalization.moving_mean, normalization.moving_variance)]
    return found, [0.5 * x.mean(0), np.full(3, 0.5)]  # the variance of one row is 0


def digest(*arrays):
    """One sha256 of all bits."""
    values = [np.ascontiguousarray(keras.ops.convert_to_numpy(array)) for array in arrays]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def trained(replicas, case, **more):
    """Digests of the weights, with all state of the model, and of the logs of all epochs, validation apart."""
    model = model_of(case)
    history = fit(model, case, **more)
    finite = [np.isfinite(values).all() for name, values in history.items() if name != "loss" or "skipped" not in case]
    state = [keras.ops.convert_to_numpy(value) for value in [*model.weights, *buffers_of(model)]]
    assert all(finite) and not any(np.isnan(value).any() for value in state)
    validation = [name for name in sorted(history) if name.startswith("val_")]
    training = sorted(history.keys() - validation)
    logs, val_logs = (digest(*[np.array(history[name]) for name in names]) for names in (training, validation))
    return {"weights": digest(*state), "logs": logs, "val_logs": val_logs}


class Stopping(keras.callbacks.Callback):
    """Ends the program in the middle of training."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.step:
            raise KeyboardInterrupt


def restarted(case, folder, step=-1):
    """As `trained`, with backups; None where it is stopped after so many batches."""
    model = model_of(case)
    backup = ks.callbacks.BackupAndRestore(folder / "backup")
    try:
        fit(model, case, epochs=3, callbacks=[backup, ks.callbacks.Fingerprints(folder / "prints"), Stopping(step)])
    except KeyboardInterrupt:
        return None
    return {"weights": digest(*model.weights), "state": digest(*model.optimizer.variables)}


def validation_of(case):
    """For `fit`: none with options of the optimizer, which has no part in it."""
    return {} if case.endswith("plain") else {"validation_data": None}


# -- on devices of this process ------------------------------------------------------------------------------------


@functools.cache
def trained_on(num_devices, case, **more):
    """What `trained` finds on so many devices of this process; None for what `data_parallel` takes by itself."""
    with ks.data_parallel(num_devices) as replicas:
        found = trained(replicas, case, **more)
    replicas.close()
    return found


def restarted_on(num_devices, case, folder, step=-1):
    """What `restarted` finds on so many devices of this process."""
    with ks.data_parallel(num_devices) as replicas:
        found = restarted(case, folder, step)
    replicas.close()
    return found


def assert_values_are_those_without_parts(case, num_devices, num_parts, but=()):
    """Compares weights and logs with those of the optimizer without virtual replicas, `but` some of the logs."""
    ends = []
    for virtual_replicas in (None, num_parts):
        with ks.data_parallel(num_devices) as replicas:
            model = model_of(case, virtual_replicas=virtual_replicas)
            history = fit(model, case)
        logs = [np.array(values) for name, values in history.items() if name not in but]
        ends.append([*map(keras.ops.convert_to_numpy, model.weights), *logs])
        replicas.close()
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
