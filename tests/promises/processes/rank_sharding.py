"""`fit`, `evaluate` and `predict` on ranks that are all given the same data, as in one process.

Arguments: the file to which rank 0 writes the names of the checks that passed, and their names.
"""

import contextlib
import functools
import json
import pathlib
import random
import sys
import time
import warnings

import keras
import numpy as np
import torch
import torch.distributed as dist
from support import checks, problem
from support.checks import check, refused
from support.launch import patient
from torch.utils import data as torch_data

import keras_shardopt as ks

warnings.filterwarnings("ignore")
BATCH = 15
X, Y = (rows[:61] for rows in problem.data(6))  # the last batch has one row
CLASSES = (np.arange(61) % 3).astype("int32")
WEIGHTS = np.linspace(0.1, 2, 61, dtype="float32")
VALIDATION = tuple(rows[61:92] for rows in problem.data(6))


def compiled(scope, make=problem.model, loss="mse", **more):
    """Of all ranks, or where there is no scope of this process."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = make()
    metrics = {"mse": {"metrics": ["mae"], "weighted_metrics": ["mse"]}, "mae": {}}.get(loss, {"metrics": ["accuracy"]})
    with contextlib.nullcontext() if scope else problem.alone():
        model.compile(ks.CrossShard(optimizer) if scope else optimizer, loss, **metrics, **more)
    return model


def trained(scope, train, make=problem.model, **more):
    """A model, what `train(model)` returns, and what random numbers come next."""
    keras.utils.set_random_seed(3)
    model = compiled(scope, make, **more)
    returned = train(model)
    return model, returned, (random.random(), np.random.random(), float(torch.rand(())))


def trained_by_one_process(scope, train, make=problem.model, **more):
    """As `trained`, with the weights in place of a model; rank 0 trains, and tells the others."""
    found = [None]
    if scope.is_chief:
        model, *others = trained(None, train, make, **more)
        found = [(model.get_weights(), *others)]
    dist.broadcast_object_list(found)
    return found[0]


def assert_as_one_process(scope, train, make=problem.model, alone=None, **more):
    """That the ranks end with the weights, logs and random numbers of one process. Returns the ranks' model."""
    mine, history, drawn = trained(scope, train, make, **more)
    expected, of_one, drawn_by_one = trained_by_one_process(scope, alone or train, make, **more)
    assert scope.largest_difference(mine) == 0
    keras.utils.set_random_seed(3)
    start = make()
    start = start.get_weights() if start.built else [0 * weight for weight in mine.get_weights()]
    difference = problem.relative_difference(mine.get_weights(), expected, start)
    assert difference <= problem.TOLERANCE, difference
    assert_same_logs(history, of_one)
    # Rank 0 goes on as one process, and the others do in all but what must differ between ranks.
    assert drawn[:2] == drawn_by_one[:2], (drawn, drawn_by_one)
    assert scope.replica_id or drawn == drawn_by_one, (drawn, drawn_by_one)
    return mine


def assert_same_logs(history, of_one):
    assert history.keys() == of_one.keys(), (history, of_one)
    for name in of_one:
        np.testing.assert_allclose(history[name], of_one[name], rtol=1e-5, atol=1e-7, err_msg=name)


def fit(*data, **more):
    """A function that trains a model; what is callable is made for each."""
    given = {"epochs": 2, "verbose": 0, **more}

    def train(model):
        return model.fit(*[each() if callable(each) else each for each in data], **given).history

    return train


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def with_classes():
    layers = [keras.Input((problem.NUM_FEATURES,)), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential(layers)


def with_dicts():
    inputs = {"a": keras.Input((2,)), "b": keras.Input((3,))}
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
    return keras.Model(inputs, {"out": keras.layers.Dense(3)(hidden), "hidden": hidden})


def unbuilt():
    """Keras builds it from the first batch."""
    return keras.Sequential([keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(problem.NUM_OUTPUTS)])


@check
def arrays(scope):
    assert_as_one_process(scope, fit(X, Y, batch_size=BATCH, validation_data=VALIDATION))
    assert_as_one_process(scope, fit(X, Y, batch_size=BATCH, validation_split=0.2, sample_weight=WEIGHTS))


@check
def arrays_in_other_ways(scope):
    for more in (
        {"shuffle": False, "validation_data": VALIDATION, "validation_batch_size": 7, "validation_freq": 2},
        {"shuffle": "batch"},
        {"steps_per_epoch": 3, "validation_data": VALIDATION, "validation_steps": 1},
        {"initial_epoch": 1},
    ):
        assert_as_one_process(scope, fit(X, Y, batch_size=BATCH, **more))
    assert_as_one_process(scope, fit(torch.tensor(X), torch.tensor(Y), epochs=1))  # in batches of 32


@check
def batches_with_fewer_rows_than_ranks(scope):
    assert_as_one_process(scope, fit(X[:7], Y[:7], batch_size=2, epochs=2, validation_data=(X[:1], Y[:1])))


@check
def class_weights(scope):
    loss = "sparse_categorical_crossentropy"
    weights = {0: 0.2, 1: 3.0, 2: 1.0}
    train = fit(X, CLASSES, batch_size=BATCH, class_weight=weights, validation_split=0.1)
    assert_as_one_process(scope, train, with_classes, loss=loss)


@check
def nested_inputs_and_outputs(scope):
    x, y = {"a": X[:, :2], "b": X[:, 2:]}, {"out": Y, "hidden": Y[:, :1]}
    train = fit(x, y, batch_size=BATCH, validation_split=0.3)
    model = assert_as_one_process(scope, train, with_dicts, loss="mae")
    found = model.predict(x, batch_size=BATCH, verbose=0)
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    expected = alone.predict(x, batch_size=BATCH, verbose=0)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


@check
def a_second_fit_draws_other_orders(scope):
    def train(model):
        first = fit(X, Y, batch_size=BATCH, epochs=2)(model)
        keras.utils.set_random_seed(8)
        between = fit(X[:30], Y[:30], batch_size=4, epochs=1)(model)
        second = fit(X, Y, batch_size=BATCH, epochs=2, validation_data=VALIDATION)(model)
        return {f"{i}{name}": of for i, logs in enumerate((first, between, second)) for name, of in logs.items()}

    assert_as_one_process(scope, train)


@check
def a_model_that_the_first_batch_builds(scope):
    assert_as_one_process(scope, fit(X, Y, batch_size=BATCH), unbuilt)


@check
def dropout_leaves_the_order_of_rows_alike(scope):
    """Whose masks are drawn, on each rank, from the numbers that one process draws orders from, too."""

    class Seen(keras.Model):
        def train_step(self, data):
            self.rows += data[0][:, 0].tolist()
            return super().train_step(data)

    layers = [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    for shuffle in (True, "batch"):
        plain = keras.Sequential(layers)
        model = compiled(scope, lambda plain=plain: Seen(plain.inputs, plain.outputs))
        model.rows = []
        model.fit(X[:60], Y[:60], batch_size=BATCH, epochs=2, shuffle=shuffle, verbose=0)
        rows = [row for of_rank in everywhere(list(model.rows)) for row in of_rank]
        assert sorted(rows) == sorted(2 * X[:60, 0].tolist()), shuffle


class Batches(keras.utils.PyDataset):
    """Batches that draw what they can draw."""

    def __init__(self, draws=True, **more):
        super().__init__(**more)
        self.draws = draws
        self.order = np.random.permutation(61) if draws else np.arange(61)

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        noise = np.random.normal(size=(len(rows), 5)) * 0.1 if self.draws else 0.0
        return (X[rows] + noise).astype("float32"), Y[rows]

    def on_epoch_begin(self):
        if self.draws:
            random.shuffle(self.order)

    def on_epoch_end(self):
        if self.draws:
            np.random.shuffle(self.order)


@check
def py_datasets(scope):
    assert_as_one_process(scope, fit(Batches, validation_data=Batches(False)))
    assert_as_one_process(scope, fit(Batches, shuffle=False, steps_per_epoch=2, class_weight=None))
    assert_as_one_process(scope, fit(Batches, epochs=2), unbuilt)


@check
def a_py_dataset_with_workers(scope):
    # It draws in a thread of its own.
    train = fit(lambda: Batches(False, workers=2))
    mine, history, _ = trained(scope, train)
    expected, of_one, _ = trained_by_one_process(scope, train)
    assert problem.relative_difference(mine.get_weights(), expected) <= problem.TOLERANCE
    assert_same_logs(history, of_one)


DATASET = torch_data.TensorDataset(torch.tensor(X), torch.tensor(Y), torch.tensor(WEIGHTS))


class Noisy(torch_data.Dataset):
    def __len__(self):
        return 61

    def __getitem__(self, index):
        return torch.tensor(X[index]) + 0.1 * torch.randn(5), Y[index]


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        for row in torch.randperm(61).tolist():
            yield X[row], Y[row]


def weighted_sampler():
    return torch_data.WeightedRandomSampler(torch.tensor(WEIGHTS), 50)


@check
def data_loaders(scope):
    for make in (
        lambda: torch_data.DataLoader(DATASET, BATCH, shuffle=True),
        lambda: torch_data.DataLoader(DATASET, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)),
        lambda: torch_data.DataLoader(DATASET, BATCH, sampler=weighted_sampler(), drop_last=True),
        lambda: torch_data.DataLoader(Noisy(), BATCH, shuffle=True),
        lambda: torch_data.DataLoader(Stream(), BATCH),
    ):
        more = {"shuffle": False, "validation_data": torch_data.DataLoader(DATASET, 8)}
        assert_as_one_process(scope, fit(make, epochs=2, **more))


@check
def a_data_loader_with_workers(scope):
    make = lambda: torch_data.DataLoader(Noisy(), BATCH, shuffle=True, num_workers=1)  # noqa: E731
    assert_as_one_process(scope, fit(make, epochs=2, shuffle=False))


def endless(draws=True):
    while True:
        rows = np.random.randint(0, 61, 13) if draws else np.arange(13)
        yield X[rows], Y[rows], WEIGHTS[rows]


@check
def generators(scope):
    more = {"steps_per_epoch": 4, "validation_steps": 2, "epochs": 2}
    assert_as_one_process(scope, lambda model: fit(endless, **more, validation_data=endless(False))(model))


@check
def evaluate_and_predict(scope):
    model = compiled(scope)
    alone = compiled(None)
    for data, more in (
        ((X, Y), {"batch_size": BATCH}),
        ((X, Y), {"sample_weight": WEIGHTS}),
        ((Batches(False),), {}),
    ):
        found = model.evaluate(*data, return_dict=True, verbose=0, **more)
        assert_same_logs(found, alone.evaluate(*data, return_dict=True, verbose=0, **more))
    loader = torch_data.DataLoader(torch_data.TensorDataset(torch.tensor(X)), BATCH)
    for data, more in ((X, {"batch_size": BATCH}), (X[:1], {}), (X, {"batch_size": 2, "steps": 5}), (loader, {})):
        found, expected = (each.predict(data, verbose=0, **more) for each in (model, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert found.dtype == expected.dtype and all(np.array_equal(found, each) for each in everywhere(found))
    np.testing.assert_array_equal(model.predict_on_batch(X[:4]), alone.predict_on_batch(X[:4]))
    seen = []
    hook = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: seen.append(len(logs["outputs"])))
    model.predict(X, batch_size=BATCH, verbose=0, callbacks=[hook])
    assert seen == [15, 15, 15, 15, 1]


class Lingers(keras.layers.Layer):
    """Is saved on rank 1 for as long as rank 0 needs to read what it has saved."""

    waits = False

    def call(self, x):
        return x

    def save_own_variables(self, store):
        if self.waits:
            dist.barrier()  # rank 0 has saved
            dist.barrier()  # and read


@check
def plain_calls_that_save(scope):
    """By every rank, none of which sees a file that another one is writing; or by one rank alone."""
    folder = pathlib.Path(sys.argv[1] + "-saved")
    folder.mkdir(exist_ok=True)
    dist.barrier()
    functions = {"save": keras.saving.save_model, "save_weights": keras.saving.save_weights}
    for shard_state, method in ((False, "save"), (True, "save"), (False, "save_weights")):
        path = folder / (f"{shard_state}.keras" if method == "save" else "model.weights.h5")
        layers = [keras.Input((problem.NUM_FEATURES,)), Lingers(), keras.layers.Dense(problem.NUM_OUTPUTS)]
        model = keras.Sequential(layers)
        model.compile(ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=shard_state), "mse")
        fit(X, Y, epochs=1)(model)
        model.layers[0].waits = bool(scope.replica_id) and not shard_state
        if shard_state:
            getattr(model, method)(path)
        elif scope.is_chief:
            functions[method](model, path)
            before = path.read_bytes()
            dist.barrier()
            assert path.read_bytes() == before
            dist.barrier()
        else:
            functions[method](model, path)
        dist.barrier()
        assert [each.name for each in folder.iterdir() if each.name.startswith(".")] == []
        if method == "save":
            again = keras.saving.load_model(path, custom_objects={"Lingers": Lingers})
        else:
            again = keras.models.clone_model(model)
            again.load_weights(path)
        assert all(np.array_equal(*each) for each in zip(again.get_weights(), model.get_weights()))
        dist.barrier()
        model.layers[0].waits = False
        if scope.is_chief and not shard_state:
            getattr(model, method)(path)
        fit(X, Y, epochs=1)(model)
        assert scope.largest_difference(model) == 0


class OtherOutputs(keras.Model):
    """What it predicts has several rows for a row, half precision, or too many rows."""

    how = "several"

    def predict_step(self, data):
        found = super().predict_step(data)
        several = keras.ops.reshape(found, (-1, 1))
        if self.how == "several":
            return {"half": keras.ops.cast(found, "bfloat16"), "several": several, "is": found > 0}
        return several[:2]


@check
def outputs_of_other_kinds(scope):
    def make():
        model = problem.model()
        return OtherOutputs(model.inputs, model.outputs)

    model, alone = compiled(scope, make), compiled(None, make)
    found, expected = (each.predict(X, batch_size=BATCH, verbose=0) for each in (model, alone))
    assert found["several"].shape == (183, 1) and found["is"].dtype == bool
    for name in ("half", "several", "is"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-2 if name == "half" else 1e-5, atol=1e-6)
    model.how = "too few"
    refused(lambda: model.predict(X[:10], verbose=0), ValueError, "must have as many rows as the batch")
    ks.prepare(model, gather=False)
    assert model.predict(X[:10], verbose=0).shape == (2, 1)


class Calls(keras.callbacks.Callback):
    """Predicts and evaluates in the middle of training."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.predict(X[:7], batch_size=4, verbose=0)

    def on_epoch_begin(self, epoch, logs=None):
        assert len(self.model.predict(X, verbose=0)) == 61

    def on_train_batch_end(self, batch, logs=None):
        self.model.predict_on_batch(X[:2])


@check
def predictions_in_the_middle_of_training(scope):
    uneven = {"batch_size": 16, "shuffle": False}
    mine, _, _ = trained(scope, fit(X, Y, callbacks=[Calls()], **uneven))
    plain, _, _ = trained_by_one_process(scope, fit(X, Y, **uneven))
    assert problem.relative_difference(mine.get_weights(), plain) <= problem.TOLERANCE


class Evaluates(keras.callbacks.Callback):
    """Draws from PyTorch's random numbers, as Keras iterates over a `DataLoader`."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.evaluate(X[:7], Y[:7], batch_size=4, verbose=0)


@check
def orders_drawn_behind_what_a_callback_draws(scope):
    for shuffle in (True, "batch"):
        train = fit(X, Y, batch_size=BATCH, shuffle=shuffle, callbacks=[Evaluates()])
        mine, _, _ = trained(scope, train)
        alone, _, _ = trained_by_one_process(scope, train)
        assert problem.relative_difference(mine.get_weights(), alone) <= problem.TOLERANCE, shuffle


@check
def data_that_draws_behind_what_a_callback_draws(scope):
    predicts = keras.callbacks.LambdaCallback()
    predicts.on_train_batch_end = lambda batch, logs: batch % 2 or predicts.model.predict(X[:7], verbose=0)
    noisy = lambda: torch_data.DataLoader(Noisy(), BATCH, shuffle=True)  # noqa: E731
    for make, more in ((Noise, {}), (Batches, {}), (noisy, {"shuffle": False}), (endless, {"steps_per_epoch": 4})):
        for callback in (Evaluates(), predicts):
            assert_as_one_process(scope, fit(make, callbacks=[callback], **more))


@check
def one_rank_alone_predicts_where_nothing_is_gathered(scope):
    model = ks.prepare(compiled(scope), gather=False)
    if scope.is_chief:
        assert len(model.predict(X, verbose=0)) == 61
    other = compiled(scope)
    call = (lambda: other.predict(X, verbose=0)) if scope.is_chief else (lambda: other.evaluate(X, Y, verbose=0))
    refused(call, ValueError, "with `prepare(model, gather=False)`, each rank predicts alone")


@check
def several_steps_per_execution(scope):
    train = fit(X, Y, batch_size=BATCH, validation_data=VALIDATION)
    mine, history, _ = trained(scope, train, steps_per_execution=4)
    alone, of_one, _ = trained_by_one_process(scope, train)
    assert problem.relative_difference(mine.get_weights(), alone) <= problem.TOLERANCE
    assert_same_logs(history, of_one)
    assert mine.steps_per_execution == 4 and len(mine.predict(X, batch_size=BATCH, verbose=0)) == 61
    mine.train_on_batch(X, Y)


@check
def parts_of_its_own(scope):
    number = scope.num_processes
    order = {"shuffle": False, "epochs": 2}
    alone = fit(X, Y, batch_size=BATCH, validation_data=VALIDATION, **order)

    def sharded(model):
        validation = ks.shard_data(*VALIDATION)
        return model.fit(
            *ks.shard_data(X, Y), batch_size=BATCH // number, validation_data=validation, verbose=0, **order
        ).history

    assert_as_one_process(scope, sharded, alone=alone)

    def with_whole_validation(model):  # each is judged by itself
        x, y = ks.shard_data(X, Y)
        more = {"batch_size": BATCH // number, "validation_data": VALIDATION, "verbose": 0, **order}
        return model.fit(x, y, **more).history

    assert_as_one_process(scope, with_whole_validation, alone=alone)

    def with_split(model):
        x, y = ks.shard_data(X[:60], Y[:60])
        return model.fit(x, y, batch_size=5, validation_split=0.2, verbose=0, **order).history

    rows = slice(0, 48)
    assert_as_one_process(
        scope, with_split, alone=fit(X[rows], Y[rows], batch_size=BATCH, validation_data=(X[48:60], Y[48:60]), **order)
    )

    def with_sampler(model):
        sampler = torch_data.DistributedSampler(DATASET, shuffle=False, drop_last=True)
        return model.fit(torch_data.DataLoader(DATASET, 5, sampler=sampler), verbose=0, **order).history

    of_60 = fit(X[:60], Y[:60], batch_size=BATCH, sample_weight=WEIGHTS[:60], **order)
    assert_as_one_process(scope, with_sampler, alone=of_60)
    loaders = (
        torch_data.DataLoader(DATASET, 5, sampler=torch_data.DistributedSampler(DATASET, shuffle=False)),
        ks.shard_data(torch_data.DataLoader(DATASET, 5)),
        ks.shard_data(Batches(False)),
        ks.shard_data(X, Y, batch_size=5),
    )
    for loader in loaders:
        model = compiled(scope)
        assert warned(functools.partial(fit(loader, shuffle=False), model)) == []
        assert scope.largest_difference(model) == 0
        predicted = model.predict(loader, verbose=0)
        assert sum(everywhere(len(predicted))) in (61, 63)
    mine = ks.shard_data(X)
    assert len(compiled(scope).predict(mine, verbose=0)) == len(mine) < 61


@check
def a_sampler_of_each_rank_shuffles_by_the_number_of_the_epoch(scope):
    seen = []

    def collate(rows):
        numbers, *batch = zip(*rows)
        seen.append(numbers)
        return [torch.stack(column) for column in batch]

    data = torch_data.StackDataset(range(60), torch.tensor(X[:60]), torch.tensor(Y[:60]))
    sampler = torch_data.DistributedSampler(data)
    loader = torch_data.DataLoader(data, 5, sampler=sampler, collate_fn=collate)
    compiled(scope).fit(loader, epochs=4, initial_epoch=1, shuffle=False, verbose=0)
    expected = []
    for epoch in (1, 2, 3):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    drawn = np.concatenate(seen[-3 * len(loader) :]).reshape(3, -1)
    assert drawn.tolist() == expected and expected[0] != expected[1], seen


class Slow(keras.utils.PyDataset):
    """Batches of which rank 1 has the third one when rank 0 has begun to work on its own."""

    def __init__(self, scope, sign, **more):
        super().__init__(**more)
        self._scope, self._sign, self.has_waited_in_vain = scope, sign, False

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and self._scope.replica_id == 1:
            limit = time.monotonic() + patient(5)
            while not self._sign.exists() and time.monotonic() < limit:
                time.sleep(0.002)
            self.has_waited_in_vain = not self._sign.exists()
        return X[15 * index : 15 * index + 15], Y[15 * index : 15 * index + 15]


class Signals(keras.layers.Layer):
    """Leaves a sign in the third training step."""

    sign, num_steps = None, 0

    def call(self, x, training=False):
        if training and self.sign:
            self.num_steps += 1
            if self.num_steps == 3:
                self.sign.touch()
        return x


@check
def a_step_begins_before_others_have_their_rows(scope):
    layers = [keras.Input((problem.NUM_FEATURES,)), Signals(), keras.layers.Dense(problem.NUM_OUTPUTS)]
    for whole in (True, False):
        model = ks.prepare(compiled(scope, lambda: keras.Sequential(layers)), auto_shard=whole)
        sign = pathlib.Path(sys.argv[1] + f"-{whole}.sign")
        if scope.is_chief:
            model.layers[0].sign, model.layers[0].num_steps = sign, 0
        batches = Slow(scope, sign)
        fit(batches, epochs=1, shuffle=False)(model)
        assert not batches.has_waited_in_vain, whole
        model.layers[0].sign = None


@check
def parts_that_each_rank_loads(scope):
    rows = slice(scope.replica_id, None, scope.num_replicas)
    order = {"shuffle": False, "epochs": 2}
    alone = fit(X, Y, batch_size=5 * scope.num_replicas, **order)
    mine = fit(X[rows], Y[rows], batch_size=5, **order)
    set_so = lambda model: mine(ks.prepare(model, auto_shard=False))  # noqa: E731
    model = assert_as_one_process(scope, set_so, alone=alone)
    assert len(model.predict(X[rows], verbose=0)) == len(X[rows])
    assert warned(lambda: mine(model)) == []
    said = everywhere(warned(lambda: [fit(X, Y, batch_size=BATCH)(model) for _ in range(2)]))
    assert [len(words) for words in said] == [1] + [0] * (scope.num_replicas - 1), said
    assert "the same first batch on all processes, so they repeat the same work" in said[0][0]
    sampler = torch_data.DistributedSampler(DATASET, scope.num_replicas, rank=0, shuffle=False)  # the same on all ranks
    loader = torch_data.DataLoader(DATASET, 5, sampler=sampler)
    said = everywhere(warned(lambda: compiled(scope).fit(loader, shuffle=False, verbose=0)))
    assert [len(words) for words in said] == [1] + [0] * (scope.num_replicas - 1), said
    with ks.data_parallel(auto_shard=False) as other:
        assert_as_one_process(other, mine, alone=alone)


def bounded(y_true, y_pred):
    """Of the errors that are small, of which there may be as many as rows, or one per row and output."""
    errors = keras.ops.reshape(keras.ops.abs(y_true - y_pred), (-1,))
    return errors[errors < 1.0]


@check
def losses_whose_values_are_chosen(scope):
    counted = []
    real = dist.all_reduce
    for loss in ("mse", keras.losses.Huber(), bounded):
        train = fit(X, Y, batch_size=BATCH, epochs=2)
        model = assert_as_one_process(scope, train, loss=loss)
        sent = []
        dist.all_reduce = lambda *args, sent=sent, **more: (sent.append(1), real(*args, **more))[1]
        train(model)
        dist.all_reduce = real
        counted.append(len(sent))
    # What Keras' own losses divide by is known without asking the other ranks.
    num_steps = 2 * -(-len(X) // BATCH)
    assert counted[0] == counted[1] == counted[2] - num_steps, (counted, num_steps)


@check
def data_that_differ_are_refused_on_every_rank(scope):
    odd = scope.replica_id == 1
    words = "from those of process 0 on process 1. Load the same data on every process"
    train = lambda *data, **more: lambda: fit(*data, batch_size=BATCH, **more)(compiled(scope))  # noqa: E731
    refused(train(X + odd, Y), ValueError, f"first batches that differ {words}")
    fewer = 61 - 15 * odd
    refused(train(X[:fewer], Y[:fewer], shuffle=False), ValueError, f"numbers of batches that differ {words}")
    refused(train(X[: 60 - odd], Y[: 60 - odd], shuffle=False), ValueError, "first batches that differ")
    # Too late for what is compared first, among batches that go without a message.
    x, y = np.tile(X, (5, 1)), np.tile(Y, (5, 1))
    x += odd * (np.arange(305) == 280)[:, None]
    words = "Received: values that differ from those of process 0 on process 1, in "
    refused(train(x, y, shuffle=False), ValueError, words)
    refused(lambda: compiled(scope).evaluate(x, y, BATCH, verbose=0), ValueError, words)
    refused(lambda: compiled(scope).evaluate(X[odd:], Y[odd:], verbose=0), ValueError, "first batches that differ")
    refused(lambda: compiled(scope).predict(X[odd:], verbose=0), ValueError, "`keras_shardopt.shard_data(...)`, or `")
    x, y = ks.shard_data(X, Y)
    some = train(x, y) if odd else train(X, Y)
    others = "".join(f", process {rank}: the whole data" for rank in range(2, scope.num_replicas))
    refused(some, ValueError, f"process 0: the whole data, process 1: a separate part{others}")

    class Loses(Batches):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x[1:], y[1:]) if odd and index == 2 else (x, y)

    refused(train(Loses(False), shuffle=False), ValueError, "Received: batches of [")

    class Differs(Batches):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x, y + odd) if index == 3 else (x, y)

    words = "Received: values that differ from those of process 0 on process 1, in batch 3 (the first is 0). Load the "
    refused(train(Differs(False), shuffle=False), ValueError, words)

    def unseeded():
        own = np.random.default_rng()
        yield X[:13], Y[:13]
        while True:
            rows = own.integers(0, 61, 13)
            yield X[rows], Y[rows]

    refused(train(unseeded(), steps_per_epoch=3), ValueError, "in batch 1 (the first is 0)")
    refused(lambda: compiled(scope).evaluate(Differs(False), verbose=0), ValueError, "in batch 3 (the first is 0)")
    refused(lambda: compiled(scope).predict(X + odd * (np.arange(61) > 40)[:, None], 15), ValueError, "in batch 2 (the")
    several = compiled(scope, with_dicts, loss="mae")
    ragged = ({"a": X[:4, :2], "b": X[: 4 - short, 2:]} for short in (1, 0))
    refused(lambda: several.predict(((x,) for x in ragged), verbose=0), ValueError, "must have the same number of rows")


@check
def what_is_drawn_elsewhere_stays_as_it_is(scope):
    """Processes that are seeded apart, as far as data goes, have the same data and numbers of their own."""
    model = compiled(scope)
    seed = scope.replica_id
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    own = random.Random(seed).random(), np.random.RandomState(seed).rand()
    model.fit(Noise(), epochs=2, verbose=0)
    drawn = random.random(), np.random.random()
    assert (drawn == own) == bool(seed)  # rank 0 goes on behind what it has drawn
    assert scope.largest_difference(model) == 0


class Noise(keras.utils.PyDataset):
    """The same everywhere although the processes are seeded apart."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return (X[:9] + np.random.normal() + random.random() + float(torch.rand(()))).astype("float32"), Y[:9]


def main():
    file, *names = sys.argv[1:]
    with ks.data_parallel() as scope:
        checks.make(scope, [name for name in names if name in checks.CHECKS], dist.barrier)
    if scope.is_chief:
        pathlib.Path(file).write_text(json.dumps(names))
    scope.close()


if __name__ == "__main__":
    main()
