"""One rank of three trains something else, in twenty ways; every rank says so before its first update, and what.

Argument: the file to which rank 0 writes the names of the cases that passed.
"""

import contextlib
import functools
import json
import pathlib
import pickle
import random
import sys
import time
import warnings

import keras
import numpy as np
import torch
from support.launch import patient

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.torch import process_group as torch_group
from keras_shardopt.fit import batch_logs
from keras_shardopt.fit.scope import largest_difference

warnings.filterwarnings("ignore")

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def layers(units=4, names=("first", "second"), frozen=False, dtype=None, num=2):
    made = [keras.layers.Dense(units, name=name, dtype=dtype) for name in names[:num]]
    made[-1].trainable = not frozen
    return keras.Sequential([keras.Input((4,)), *made])


def halved(grads, variables):
    return [None if g is None else g / 2 for g in grads]


def doubled(grads, variables):
    return [None if g is None else g * 2 for g in grads]


def decay(rate):
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, rate)


def sgd(**arguments):
    return {"optimizer": lambda: ks.CrossShard(SGD(**{"learning_rate": 0.1, **arguments}))}


def cross_shard(inner="sgd", **arguments):
    return {"optimizer": lambda: ks.CrossShard(inner() if callable(inner) else inner, **arguments)}


# What most ranks train, what one trains (arguments of `trains`), and what the error names.
CASES = {
    "size of a layer": ({}, {"model": lambda: layers(units=5)}, "of shape (4, 5)"),
    "order of layers": ({}, {"model": lambda: layers(names=("second", "first"))}, "`sequential/second/kernel`"),
    "name of a layer": ({}, {"model": lambda: layers(names=("first", "third"))}, "`sequential/third/kernel`"),
    "dtype": ({}, {"model": lambda: layers(dtype="float16")}, "in float16 on process"),
    "missing layer": ({}, {"model": lambda: layers(num=1)}, "number of trainable variables: "),
    "frozen layer": ({}, {"model": lambda: layers(frozen=True)}, "number of trainable variables: "),
    "learning rate": (sgd(), sgd(learning_rate=0.2), "`learning_rate` of optimizer 1 (SGD): "),
    "momentum": (sgd(), sgd(momentum=0.5), "`momentum` of optimizer 1 (SGD): "),
    "nesterov": (sgd(), sgd(nesterov=True), "`nesterov` of optimizer 1 (SGD): "),
    "weight decay": (sgd(), sgd(weight_decay=0.1), "`weight_decay` of optimizer 1 (SGD): "),
    "clipnorm": (sgd(), sgd(global_clipnorm=1.0), "`global_clipnorm` of optimizer 1 (SGD): "),
    "ema": (sgd(), sgd(use_ema=True), "`use_ema` of optimizer 1 (SGD): "),
    "a schedule": (sgd(), sgd(learning_rate=decay(0.5)), "ExponentialDecay("),
    "rate of a schedule": (sgd(learning_rate=decay(0.5)), sgd(learning_rate=decay(0.6)), "'decay_rate': 0.6"),
    "class of optimizer": (sgd(), cross_shard("rmsprop"), "class of optimizer 1: "),
    "missing wrapper": (
        cross_shard(lambda: ks.GradientClipping(SGD(0.1), 1.0)),
        cross_shard(lambda: SGD(0.1)),
        "GradientClipping on process",
    ),
    "argument of a wrapper": (
        cross_shard(lambda: ks.GradientClipping(SGD(0.1), 1.0)),
        cross_shard(lambda: ks.GradientClipping(SGD(0.1), 2.0)),
        "`clip_gradients` of optimizer 1 (GradientClipping): ",
    ),
    "reduction": (cross_shard(), cross_shard(reduction="sum"), "`reduction` of optimizer 0 (CrossShard): "),
    "groups": (
        cross_shard(),
        cross_shard(group_assignment=[[0], [1], [2]]),
        "`group_assignment` of optimizer 0 (CrossShard): ",
    ),
    "a function": (
        cross_shard(replica_transform=halved),
        cross_shard(replica_transform=doubled),
        "`replica_transform` of optimizer 0 (CrossShard): ",
    ),
    "version of Keras": ({}, {"version": (keras, "3.99.0")}, "Keras: "),
    "version of keras_shardopt": ({}, {"version": (ks, "9.9")}, "keras_shardopt: "),
    "version of PyTorch": ({}, {"version": (torch, "9.9.9+cpu")}, "PyTorch: "),
}


def trains(rank, model=layers, optimizer=lambda: ks.CrossShard(SGD(0.1)), version=None, through="apply", builds=True):
    """One update, or the error instead of it, and whether any variable changed."""
    model, optimizer = model(), optimizer()
    module, number = version or (keras, keras.__version__)
    before_version, module.__version__ = module.__version__, number
    try:
        if builds:  # else with the model that it is compiled with
            optimizer.build(model.trainable_variables)
    finally:
        module.__version__ = before_version
    for variable in model.trainable_variables:
        variable.assign_add(keras.ops.ones(variable.shape, variable.dtype) * rank)
    before = [keras.ops.convert_to_numpy(v).copy() for v in [*model.variables, *optimizer.variables]]
    message = None
    try:
        if through == "apply":
            grads = [torch.ones(tuple(v.shape), dtype=v.value.dtype) for v in model.trainable_variables]
            optimizer.apply(grads, model.trainable_variables)
        else:
            model.compile(optimizer, "mse")
            x = np.ones((4, 4))
            if through == "prepare":
                ks.prepare(model)
            callbacks = [ks.callbacks.SyncReplicas()] if through == "SyncReplicas" else []
            model.fit(x, np.ones((4, model.output_shape[1])), batch_size=4, verbose=0, callbacks=callbacks)
    except ValueError as error:
        message = str(error)
    after = [keras.ops.convert_to_numpy(v) for v in [*model.variables, *optimizer.variables]]
    return message, all((a == b).all() for a, b in zip(before, after))


def with_dropout(rate):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dropout(rate, name="dropout"), keras.layers.Dense(4)])


X = np.ones((4, 4))


def fit(model, **arguments):
    model.fit(X, X, batch_size=2, verbose=0, **arguments)


def fit_prepared(model):
    fit(ks.prepare(model))


def evaluate_prepared(model):
    ks.prepare(model).evaluate(X, X, verbose=0)


def fit_with_sync_replicas(model):
    fit(model, callbacks=[ks.callbacks.SyncReplicas()])


def fit_twice(model):
    fit(model)
    fit(model)


def fit_and_fit_prepared(model):
    fit(model)
    fit_prepared(model)


def save_alone(model):
    ks.prepare(model)
    ks.save_model(model, "alone.keras")


# What most ranks call, what one calls, and what every rank says of both.
TRAINS = "trains a prepared model"
STEPS = "makes a step of a prepared model"
BEGINS = "compares its trained variables before its first update"
CALLS = {
    "prepare on one rank": (fit, fit_prepared, (BEGINS, TRAINS)),
    "prepare on all but one": (fit_prepared, fit, (TRAINS, BEGINS)),
    "evaluate on one rank": (
        fit_prepared,
        evaluate_prepared,
        ("trains a prepared model", "evaluates a prepared model (call `evaluate` on all ranks: each gets"),
    ),
    "save_model on one rank": (fit_prepared, save_alone, (TRAINS, "saves a model or a backup, in which all ranks")),
    "SyncReplicas on one rank": (fit, fit_with_sync_replicas, ("takes the weights of rank 0", "in a callback")),
}
ROWS = np.random.default_rng(0).normal(size=(240, 4)).astype("float32")


def fit_long(model, **arguments):
    """Most of its batches go without a message."""
    ks.prepare(model).fit(ROWS, ROWS, batch_size=4, verbose=0, **arguments)


def calling(function, before=12):
    """Calls it before one of the batches."""
    return [
        keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: function() if batch == before else None)
    ]


def stop_early(model):
    fit_long(model, callbacks=calling(lambda: setattr(model, "stop_training", True)))


def evaluate_in_the_middle(model):
    fit_long(model, callbacks=calling(lambda: model.evaluate(ROWS, ROWS, verbose=0)))


def leave_and_evaluate(model, before=12):
    """A program that catches what a callback raises."""
    with contextlib.suppress(KeyError):
        fit_long(model, callbacks=calling(lambda: {}["left"], before))
    model.evaluate(ROWS, ROWS, verbose=0)


def train_another(model, then=lambda: None):
    """A prepared model, on all ranks, for which nothing is promised."""
    other = layers()
    other.compile(ks.CrossShard(SGD(0.1)), "mse")
    ks.prepare(other)

    def call():
        other.train_on_batch(X, X)
        then()

    fit_long(model, callbacks=calling(call))


def train_another_and_stop(model):
    train_another(model, lambda: setattr(model, "stop_training", True))


def leave_out_an_update(model):
    """A program that catches an error of its own in a step."""
    real, batches = model.train_step, []

    def train_step(data):
        batches.append(1)
        return {"loss": 0.0} if len(batches) == 12 else real(data)

    object.__setattr__(model, "train_step", train_step)
    fit_long(model)


REDUCES = "reduces the gradients of an update"


def loop_of_ones_own(model, leaves=False, **speed):
    """A custom training loop, which one rank leaves after an error that it caught, for a call of all ranks."""
    optimizer, variables = ks.CrossShard(SGD(0.1), torch=ks.TorchSpeed(**speed)), model.trainable_variables
    for step in range(3):
        if leaves and step == 2:
            largest_difference(model.trainable_variables)
        model.zero_grad()
        model(ROWS[:4]).sum().backward()
        optimizer.apply([v.value.grad for v in variables], variables)


CALLS_IN_PROMISED_STEPS = {
    "one leaves out an update": (fit_long, leave_out_an_update, (STEPS, "a prepared model")),
    "one stops early": (fit_long, stop_early, (STEPS, "ends an epoch of a prepared model")),
    "one evaluates": (fit_long, evaluate_in_the_middle, (STEPS, "begins: evaluates a prepared model")),
    "one leaves and evaluates": (fit_long, leave_and_evaluate, (STEPS, "begins: evaluates a prepared model")),
    "one leaves the last promised step": (
        fit_long,
        functools.partial(leave_and_evaluate, before=4),
        (STEPS, "begins: evaluates a prepared model"),
    ),
    "one stops after a batch of another model": (
        train_another,
        train_another_and_stop,
        (STEPS, "ends an epoch of a prepared model"),
    ),
    "one leaves a loop of its own": (
        loop_of_ones_own,
        functools.partial(loop_of_ones_own, leaves=True),
        (REDUCES, "compares weights"),
    ),
    "one leaves a loop without overlap": (
        functools.partial(loop_of_ones_own, overlap=False),
        functools.partial(loop_of_ones_own, overlap=False, leaves=True),
        ("exchanges tensors", "compares weights"),
    ),
}
CALLS_THAT_MEET_GRADIENTS = {
    "prepare on one rank later": (fit_twice, fit_and_fit_prepared, (REDUCES, TRAINS)),
}


def different_calls(name, scope, usual, other, words, kind):
    keras.backend.clear_session()
    model = layers()
    model.compile(ks.CrossShard(SGD(0.1)), "mse")
    odd = 1
    try:
        (other if scope.replica_id == odd else usual)(model)
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"{name}: nothing raised")
    assert "must make the same calls" in message, (name, message)
    for rank, word in enumerate((words[0], words[1], words[0])):
        assert f"rank {rank} " in message and word in message, (name, message)
    return name


class Unreadable(torch.utils.data.Dataset):
    """Rows of which one rank cannot read one."""

    def __init__(self, fails):
        self.fails = fails

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, i):
        if i == 100 and self.fails:
            raise OSError("cannot read row 100")
        return ROWS[i], ROWS[i]


def error_on_one_rank(scope):
    """It catches that, and neither ends nor closes its connections, until the others have raised."""
    model = layers()
    model.compile(ks.CrossShard(SGD(0.1)), "mse")
    rows = torch.utils.data.DataLoader(Unreadable(scope.replica_id == 1), batch_size=4)
    ended = [pathlib.Path(f"{sys.argv[1]}.{rank}") for rank in (0, 2)]
    try:
        ks.prepare(model).fit(rows, shuffle=False, verbose=0)
    except OSError:
        assert scope.replica_id == 1
        limit = time.monotonic() + patient(60)
        while not all(file.exists() for file in ended):
            assert time.monotonic() < limit, "others wait for a rank that lives on"
            time.sleep(0.05)
    except RuntimeError as error:
        assert "rank 1 has left with OSError: cannot read row 100" in str(error), error
        pathlib.Path(f"{sys.argv[1]}.{scope.replica_id}").touch()
    else:
        raise AssertionError("nothing raised")
    return "an error on one rank, which lives on"


def make_more_layers_than_others():
    """What moves Keras' counters: layers, models and optimizers that have nothing to do with training."""
    for _ in range(3):
        other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
        other.compile("sgd")
        other.optimizer.build(other.trainable_variables)


def auto_named():
    return keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(4) for _ in range(3)]])


def main():
    passed = []
    chosen = random.Random(5)
    with ks.data_parallel(timeout=60, prepare=False) as scope:
        rank, size = scope.replica_id, scope.num_replicas
        ways = ["apply", "fit", "prepare", "SyncReplicas"]
        for number, (name, (usual, other, words)) in enumerate(CASES.items()):
            keras.backend.clear_session()
            odd = chosen.randrange(size)
            arguments = {**usual, **other} if rank == odd else usual
            through = ways[number % 4] if name not in ("groups", "a function") else "apply"
            message, unchanged = trains(rank, **arguments, through=through)
            assert message is not None, f"{name}: not refused through {through}"
            assert words in message, f"{name}: {message}"
            assert f"on process {odd}" in message, f"{name}, {odd}: {message}"
            assert unchanged, name
            assert len(set(processes.gather_objects(message))) == 1
            passed.append(name)

        # Right programs: other counters, other names of optimizers, functions that have no name.
        keras.backend.clear_session()
        if rank == 1:
            make_more_layers_than_others()
        wrapped = cross_shard(lambda: SGD(0.1, name=f"sgd_of_{rank}"), replica_transform=halved)
        assert trains(0, model=auto_named, **wrapped) == (None, False)
        if rank == 2:
            auto_named()
        clipped = cross_shard(lambda: ks.VariableClipping(Adam(lambda: 0.1), {".*kernel": [0]}, 1.0))
        assert trains(0, model=auto_named, **clipped, through="prepare") == (None, False)
        passed.append("right programs")
        # Compared once: a rate that changes later, and differently, is the caller's affair.
        optimizer, model = ks.CrossShard(SGD(0.1)), layers()
        optimizer.build(model.trainable_variables)
        calls, loads = [], pickle.loads
        pickle.loads = lambda *a, **k: (calls.append(1), loads(*a, **k))[1]
        for _ in range(3):
            optimizer.apply([torch.ones(tuple(v.shape)) for v in model.trainable_variables])
        pickle.loads = loads
        assert len(calls) == 2 * size, calls  # the digest, and what `broadcast_from_rank_0` asks
        passed.append("compared once")

        # A model that differs in what no variable shows.
        keras.backend.clear_session()
        message, _ = trains(rank, model=lambda: with_dropout(0.1 + 0.1 * (rank == 1)), through="fit", builds=False)
        assert "`rate` of layer 1, `dropout`: 0.1 on processes 0 and 2, 0.2 on process 1" in message, message
        passed.append("rate of a layer")

        for name, (usual, other, words) in CALLS.items():
            passed.append(different_calls(name, scope, usual, other, words, ValueError))
    for name, (usual, other, words) in CALLS_THAT_MEET_GRADIENTS.items():
        # The ranks wait for each other until the time is up, and then the group is gone.
        torch_group.ANSWER_SECONDS = 5.0
        with ks.data_parallel(timeout=3, prepare=False) as scope:
            passed.append(different_calls(name, scope, usual, other, words, RuntimeError))
    batch_logs._QUIET_SECONDS, torch_group.AWAY_SECONDS = 60.0, 1.5
    for name, (usual, other, words) in CALLS_IN_PROMISED_STEPS.items():
        with ks.data_parallel(prepare=False) as scope:
            passed.append(different_calls(name, scope, usual, other, words, ValueError))
    with ks.data_parallel(prepare=False) as scope:
        passed.append(error_on_one_rank(scope))
    if rank == 0:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(passed))


main()
