"""Checks of weights that are divided among ranks between steps. Each prints nothing and raises when it fails.

Arguments: the file to which rank 0 writes the names of the checks that passed, and the names to run.
"""

import contextlib
import copy
import pickle
import sys
import warnings
from unittest import mock

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras import layers
from support import checks, problem
from support.checks import check, refused
from torch.multiprocessing.reductions import StorageWeakRef

import keras_shardopt as ks
from keras_shardopt.extensions.sharded_weights.torch import buckets

warnings.filterwarnings("ignore")
NUM_STEPS = 4
TINY = 1e-3  # MiB: a bucket for each layer


def cross_shard(scope, divides, inner=None, prefetch=1, **arguments):
    inner = problem.sgd_momentum() if inner is None else inner
    extensions = [ks.ShardedWeights(prefetch)] if divides else []
    speed = ks.TorchSpeed(bucket_mib=TINY)
    return ks.CrossShard(inner, shard_state=True, extensions=extensions, torch=speed, **arguments)


def dense(*more, num=4, **arguments):
    widths = [layers.Dense(24, activation="tanh", **arguments) for _ in range(num)]
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *widths, *more, layers.Dense(problem.NUM_OUTPUTS)])


def used_twice():
    inputs, layer, widen = keras.Input((problem.NUM_FEATURES,)), layers.Dense(24), layers.Dense(24, activation="tanh")
    outputs = widen(inputs)
    for _ in range(2):
        outputs = layers.Dense(24, activation="tanh")(layer(outputs))
    return keras.Model(inputs, layers.Dense(problem.NUM_OUTPUTS)(outputs))


class OtherLayersWeight(layers.Layer):
    def __init__(self, other):
        super().__init__()
        self.other = other

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.other.kernel))


def transposed():
    first = layers.Dense(24)
    return keras.Sequential(
        [keras.Input((problem.NUM_FEATURES,)), first, layers.Dense(24), OtherLayersWeight(first), layers.Dense(24)]
        + [layers.Dense(problem.NUM_OUTPUTS)]
    )


def recurrent():
    inputs = keras.Input((problem.NUM_FEATURES,))
    states = layers.LSTM(12)(layers.Reshape((problem.NUM_FEATURES, 1))(inputs))
    return keras.Model(inputs, layers.Dense(problem.NUM_OUTPUTS)(states))


def recomputed():
    with keras.RematScope(mode="full"):
        return dense()


def frozen():
    model = dense()
    model.layers[2].trainable = False
    return model


MODELS = {
    "dense": dense,
    "batch_norm": lambda: dense(layers.BatchNormalization()),
    "synchronized": lambda: dense(layers.BatchNormalization(synchronized=True)),
    "spectral": lambda: dense(layers.SpectralNormalization(layers.Dense(24))),
    "regularized": lambda: dense(kernel_regularizer="l2"),
    **{f.__name__: f for f in (used_twice, transposed, recurrent, recomputed, frozen)},
}


class Reads(keras.callbacks.Callback):
    """Calls a function in each step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        self.function(self.model)


def made(scope, optimizer, make=dense, loss="mse", **arguments):
    keras.utils.set_random_seed(3)
    model = make()
    model.compile(optimizer, loss, **arguments)
    return ks.prepare(model, auto_shard=True)


def fitted(model, num_steps=NUM_STEPS, **arguments):
    x, y = problem.data(num_steps)
    return model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0, **arguments).history


def held_by(model):
    (stage,) = model.optimizer.extension_stages
    return stage.weights


def assert_same(a, b):
    assert len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def trained_both_ways(scope, make=dense, inner=problem.sgd_momentum, between=lambda model: None, **arguments):
    """Weights and logs without and with divided weights. With them, a step holds a rank's slices only."""
    found = []
    for divides in (False, True):
        model = made(scope, cross_shard(scope, divides, inner(), **arguments), make)
        logs = [fitted(model, validation_data=problem.data(2))]
        between(model)
        logs.append(fitted(model))
        values = [np.array(value) for each in logs for value in each.values()]
        found.append([*values, model.predict(problem.data(1)[0], verbose=0), *model.get_weights()])
    assert held_by(model).gathers._orders[True]
    return found


FIRST = ("dense", "synchronized")


@check
def weights_are_those_of_sharded_state(scope):
    for name in FIRST:
        assert_same(*trained_both_ways(scope, MODELS[name]))


@check
def functions_take_weights_in_a_tuple(scope):
    def stacked(x, weight):
        return x @ torch.stack((weight, weight)).mean(0)

    assert_same(*trained_both_ways(scope, lambda: dense(Calls(stacked))))


@check
def layers_use_weights_as_they_like(scope):
    for name in [name for name in MODELS if name not in FIRST]:
        assert_same(*trained_both_ways(scope, MODELS[name]))


@check
def options_of_updates_keep_their_meaning(scope):
    assert_same(*trained_both_ways(scope, inner=lambda: keras.optimizers.AdamW(0.01, use_ema=True)))
    assert_same(*trained_both_ways(scope, inner=lambda: ks.LossScaling(problem.sgd_momentum())))
    assert_same(*trained_both_ways(scope, gradient_accumulation_steps=2))
    assert_same(*trained_both_ways(scope, on_nonfinite="skip", compression="bfloat16"))
    assert_same(
        *trained_both_ways(scope, between=lambda model: model.set_weights([w / 2 for w in model.get_weights()]))
    )


@check
def a_rank_holds_its_slices_between_steps_and_some_buckets_in_them(scope):
    model, gathered, most, bytes_held = made(scope, cross_shard(scope, True), lambda: dense(num=9)), [], [], []
    begin = buckets.Bucket.begin

    def noted(bucket):
        begin(bucket)
        gathered.append(StorageWeakRef(bucket.flat.untyped_storage()))
        if bucket.gathers._order is not None:  # in a step, not at the end of `fit`
            most.append(sum(not memory.expired() for memory in gathered))

    def look(model):
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [v._value for v in model.trainable_variables] + [
                v._value for v in model.optimizer._shards.stand_ins
            ]
            memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        assert all(bucket.flat is None for bucket in held_by(model).gathers.buckets)
        bytes_held.append(sum(memory.values()))

    with mock.patch.object(buckets.Bucket, "begin", noted):
        fitted(model, callbacks=[Reads(look)])
    num_buckets = len(held_by(model).gathers.buckets)
    whole = sum(w.nbytes for w in model.get_weights())
    number = len(model.trainable_variables)
    padding = 4 * (num_buckets + number)
    assert len(bytes_held) == NUM_STEPS and max(bytes_held) <= whole / scope.num_replicas + padding
    # The recent buckets, the next one, and a bucket whose weight the current operation uses.
    assert max(most) <= buckets.NUM_RECENT + 2 < num_buckets - 2


@check
def gathers_are_expected_from_the_second_step_on(scope):
    counts = []
    for prefetch in (0, 2):
        model, seen = made(scope, cross_shard(scope, True, prefetch=prefetch)), []
        begin = mock.patch.object(buckets.Bucket, "begin", autospec=True, side_effect=buckets.Bucket.begin)
        announce = mock.patch.object(buckets, "announce", wraps=buckets.announce)
        with begin as begun, announce as announced:

            def count(model):
                seen.append((begun.call_count, announced.call_count))  # noqa: B023

            fitted(model, callbacks=[Reads(count)])
        (first, asked), *_, (last, still) = seen
        assert asked == first and still == asked
        counts.append((first, last))
    (first, last), (first_ahead, last_ahead) = counts
    # The last bucket of the forward pass is the first of the backward pass, and stays.
    assert first == first_ahead and last == NUM_STEPS * first and last_ahead <= last


@check
def all_ranks_may_read_and_assign_in_callbacks(scope):
    found = []
    for divides in (False, True):
        model, values = made(scope, cross_shard(scope, divides)), []

        def use(model):
            values.extend(model.get_weights())  # noqa: B023
            kernel = model.layers[1].kernel
            kernel.assign(kernel * 0.5)
            values.append(model.predict_on_batch(problem.data(1)[0]))  # noqa: B023

        fitted(model, callbacks=[Reads(use)])
        found.append([*values, *model.get_weights()])
    assert_same(*found)


@check
def steps_of_other_kinds(scope):
    class Penalized(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = dense()
            self.calls = 0

        def call(self, x):
            return self.parts(x)

        def train_step(self, data):
            x, y = data[:2]
            x = keras.ops.convert_to_tensor(x).clone().requires_grad_()
            self.calls += 1
            for _ in range(2 if self.calls > 2 else 1):  # other gathers than in the previous step
                outputs = self(x, training=True)
                (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
                loss = self.compute_loss(y=y, y_pred=outputs) + (slope**2).mean()
                self.zero_grad()
                loss.backward()
                with torch.no_grad():
                    weights = self.trainable_weights
                    self.optimizer.apply([v.value.grad for v in weights], weights)
            return {"loss": loss}

    def make():
        model = Penalized()
        model.build((None, problem.NUM_FEATURES))
        return model

    found = []
    for divides in (False, True):
        model = made(scope, cross_shard(scope, divides), make)
        fitted(model)
        x, y = problem.data(1)
        logs = [np.array(model.train_on_batch(x, y))]
        optimizer, weights = model.optimizer, model.trainable_weights
        for whole in (False, True):  # a loop of the program, also on weights that are still divided
            if whole:
                model.optimizer.pipeline.before_reading()
            model.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.apply([v.value.grad for v in weights], weights)
        found.append([*logs, *model.get_weights()])
    assert_same(*found)


@check
def fit_continues_after_an_error(scope):
    def fail(model):
        raise KeyError("stop")

    found = []
    for divides in (False, True):
        model = made(scope, cross_shard(scope, divides))
        with contextlib.suppress(KeyError):
            fitted(model, callbacks=[Reads(fail)])
        weights = model.get_weights()
        fitted(model)
        found.append([*weights, *model.get_weights()])
    assert_same(*found)


@check
def files_have_whole_weights(scope):
    (folder,) = [None] if not scope.is_chief else [sys.argv[1] + "-files"]
    holder = [folder]
    dist.broadcast_object_list(holder)
    (folder,) = holder
    found = []
    for divides in (False, True):
        model = made(scope, cross_shard(scope, divides, keras.optimizers.Adam(0.01)))
        fitted(
            model,
            callbacks=[
                ks.callbacks.BackupAndRestore(f"{folder}{divides}", delete_checkpoint=False),
                ks.callbacks.ModelCheckpoint(f"{folder}{divides}.weights.h5", save_weights_only=True, save_freq=2),
                ks.callbacks.ShardedCheckpoint(f"{folder}{divides}-parts", save_freq=3),
            ],
        )
        ks.save_model(model, f"{folder}{divides}.keras")
        loaded = [dense() for _ in range(2)]
        loaded[0].load_weights(f"{folder}{divides}.weights.h5")
        loaded[1].compile(cross_shard(scope, divides, keras.optimizers.Adam(0.01)), "mse")
        ks.load_sharded(loaded[1], f"{folder}{divides}-parts")
        again = keras.models.load_model(f"{folder}{divides}.keras")
        assert again.optimizer.extensions == () or "ShardedWeights" in repr(again.optimizer)
        resumed = made(scope, cross_shard(scope, divides, keras.optimizers.Adam(0.01)))
        fitted(resumed, epochs=2, callbacks=[ks.callbacks.BackupAndRestore(f"{folder}{divides}")])
        assert resumed.optimizer.iterations == 2 * NUM_STEPS
        found.append([w for each in (*loaded, again, resumed) for w in each.get_weights()])
    assert_same(*found)


CHANGES = {
    "data": lambda weights: [w.data.clamp_(-0.1, 0.1) for w in weights],
    "set data": lambda weights: [setattr(w, "data", w.data * 0.5) for w in weights],
    "view": lambda weights: [w[0].zero_() for w in weights],
    "out": lambda weights: [torch.clamp(w, -0.1, 0.1, out=w) for w in weights],
    "initializer": lambda weights: [torch.nn.init.constant_(w, 0.1) for w in weights],
    "all at once": lambda weights: torch._foreach_mul_(weights, 0.5),
    "one vector": lambda weights: torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(weights) * 0.5, weights
    ),
}


class Loop(keras.Model):
    """Applies an optimizer in a step of its own, then changes the weights in place, in one of several ways."""

    def __init__(self, change, inputs):
        super().__init__()
        self.parts, self.change, self.inputs_of_backward = dense(), CHANGES[change], inputs
        self.build((None, problem.NUM_FEATURES))

    def call(self, x):
        return self.parts(x)

    def train_step(self, data):
        loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        weights = [variable.value for variable in self.trainable_weights]
        if self.inputs_of_backward:
            self.zero_grad()
            loss.backward(inputs=weights)
            grads = [weight.grad for weight in weights]
        else:
            grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            self.optimizer.apply(grads, self.trainable_weights)
            self.change(weights)
        return {"loss": loss}


@check
def a_loop_of_the_program_may_change_weights_in_place(scope):
    for i, change in enumerate(CHANGES):
        found = []
        for divides in (False, True):
            model = made(scope, cross_shard(scope, divides), lambda: Loop(change, i % 2 == 0))  # noqa: B023
            fitted(model)
            found.append(model.get_weights())
        assert_same(*found)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Calls(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        return self.function(x, self.kernel.value)

    def compute_output_shape(self, shape):
        return shape


@check
def functions_of_the_program_get_and_save_weights(scope):
    def recomputed(x, weight):
        return torch.utils.checkpoint.checkpoint(lambda x, w: torch.tanh(x @ w), x, weight, use_reentrant=False)

    for function in (Product.apply, recomputed):
        assert_same(*trained_both_ways(scope, lambda: dense(Calls(function))))  # noqa: B023


@check
def models_may_share_divided_weights_and_a_step_has_one_such_optimizer(scope):
    found = []
    for divides in (False, True):
        first = made(scope, cross_shard(scope, divides))
        second = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *first.layers])
        second.compile(cross_shard(scope, divides), "mae")
        ks.prepare(second, auto_shard=True)
        for _ in range(3):
            for model in (first, second):
                model.train_on_batch(*problem.data(1))
        found.append(first.get_weights())
    assert_same(*found)

    class Two(keras.Sequential):
        def compile(self, optimizer, other, **arguments):
            super().compile(optimizer, **arguments)
            self.other = other

        def train_step(self, data):
            raise AssertionError("is refused before")

    model = Two(dense().layers)
    model.compile(cross_shard(scope, True), cross_shard(scope, True), loss="mse")
    for optimizer, part in ((model.optimizer, model.layers[:2]), (model.other, model.layers[2:])):
        optimizer.build([v for layer in part for v in layer.trainable_variables])
    ks.prepare(model, auto_shard=True)
    refused(lambda: fitted(model), ValueError, "one optimizer of a model")


@check
def copies_and_pickles_of_weights_are_whole(scope):
    def compare(model):
        for value in (variable.value for variable in model.trainable_variables):
            for copied in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
                assert type(copied) is torch.nn.Parameter and copied.requires_grad
                np.testing.assert_array_equal(copied.detach().numpy(), value.detach().numpy())
        names.append({type(v.value).__name__ for v in model.trainable_variables})

    names = []
    model = made(scope, cross_shard(scope, True))
    fitted(model, callbacks=[Reads(compare)])
    compare(model)
    assert names == [{"HeldParameter"}] * NUM_STEPS + [{"Parameter"}]


@check
def unsupported_programs_are_errors(scope):
    def fit(make=dense, optimizer=None, **arguments):
        fitted(made(scope, optimizer or cross_shard(scope, True), make, **arguments))

    refused(lambda: fit(lambda: dense(kernel_constraint="non_neg")), ValueError, "must have no constraints")
    refused(lambda: fit(optimizer=cross_shard(scope, True, keras.optimizers.Lamb())), ValueError, "element-wise")
    refused(lambda: fit(jit_compile=True), ValueError, "jit_compile=False")

    class Late(keras.Sequential):
        def train_step(self, data):
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([torch.zeros(tuple(v.shape)) for v in weights], weights)
            loss.backward()

    refused(lambda: fit(lambda: Late(dense().layers)), RuntimeError, "before `optimizer.apply`")


@check
def ranks_that_gather_in_different_orders_raise(scope):
    class TwoOrders(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(problem.NUM_OUTPUTS) for _ in range(2)]

        def build(self, shape):
            for part in self.parts:
                part.build((None, problem.NUM_FEATURES))

        def call(self, x):
            order = -1 if scope.is_chief else 1
            return keras.ops.add(*[part(x) for part in self.parts[::order]])

    def make():
        model = TwoOrders()
        model.build((None, problem.NUM_FEATURES))
        return model

    optimizer = ks.CrossShard(
        "sgd", shard_state=True, extensions=[ks.ShardedWeights()], torch=ks.TorchSpeed(bucket_mib=1e-6)
    )
    refused(lambda: fitted(made(scope, optimizer, make)), ValueError, "in the same order")


if __name__ == "__main__":
    checks.main(ks.data_parallel, dist.barrier)
