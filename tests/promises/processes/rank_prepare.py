"""Trains on uneven parts of each batch after `prepare(model)`, on the ranks that torchrun started.

Argument: the file to write.
"""

import contextlib
import io
import sys
import warnings

import keras
import numpy as np
import torch
from promises.problems import uneven
from support.checks import refused

import keras_shardopt as ks
from keras_shardopt.backends.torch import process_group

warnings.filterwarnings("ignore")


def unequal_parts():
    for name, case in uneven.CASES.items():
        yield name, uneven.divided, case
    yield "plain", uneven.some_without, {}
    yield "added loss", uneven.some_without, uneven.CASES["added loss"]
    yield "mask", uneven.some_without, uneven.CASES["mask"]
    for case in ("two outputs", "two losses"):  # with penalties
        yield case, uneven.some_without, uneven.CASES[case]
    yield "divided by weights", uneven.all_on_the_last, uneven.CASES["divided by weights"]


def train(replicas, case, division, **fit):
    rows = division(replicas.replica_id, replicas.num_replicas)
    keras.utils.set_random_seed(replicas.replica_id)
    model = uneven.compiled(**case)
    if replicas.replica_id:
        model.set_weights([w + 1 for w in model.get_weights()])  # rank 0's are taken
    ks.prepare(ks.prepare(model, auto_shard=False))
    given = {"verbose": 0, "shuffle": False, **case.get("fit", {}), **fit}
    history = model.fit(uneven.Batches(case, rows), validation_data=uneven.Batches(case, rows), **given)
    return model, history.history


def everywhere(value):
    """What each rank has."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def equal_everywhere(value):
    """Whether all ranks have the same."""
    values = everywhere(value)
    return all(other == values[0] for other in values)


def raised(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing"


class StopEarly(keras.callbacks.Callback):
    """Stops this rank, and no other."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


class Predicts(keras.callbacks.Callback):
    """Calls models in the middle of the training of another one."""

    def __init__(self, models):
        super().__init__()
        self.models = models

    def on_epoch_end(self, epoch, logs=None):
        x, y = uneven.data()
        for model in [*self.models, self.model]:
            model.predict(x[:5], verbose=0)
        self.models[-1].evaluate(x[:5], y[:5], verbose=0)


def main():
    results = {}
    with ks.data_parallel(prepare=False) as replicas:
        rank, size = replicas.replica_id, replicas.num_replicas
        for name, division, case in unequal_parts():
            model, history = train(replicas, case, division)
            key = f"{name}/{division.__name__}"
            results[f"{key}/difference"] = replicas.largest_difference(model)
            results[f"{key}/same logs"] = equal_everywhere(history)
            for i, weight in enumerate(model.get_weights()):
                results[f"{key}/weight{i}"] = weight
            for metric, values in history.items():
                results[f"{key}/log/{metric}"] = values

        assert process_group._open.num_due == 0  # or calls of other ranks would seem to break a promise

        clipped = {"around": {"replica_clipnorm": 0.9}}
        rows = [np.split(batch, [4 * r for r in range(1, size)])[rank] for batch in uneven.batches()]
        model, _ = train(replicas, clipped, lambda *_: rows)
        for i, weight in enumerate(model.get_weights()):
            results[f"clipped/weight{i}"] = weight

        # One batch at a time, the last rank without rows.
        model = ks.prepare(uneven.compiled(), auto_shard=False)
        nothing = uneven.rows_of({}, slice(0))
        refused(lambda: model.train_on_batch(*nothing), ValueError, "`x` is empty on every rank")
        logs = []
        for batch in uneven.batches():
            x, y = uneven.rows_of({}, batch if rank == 0 else batch[:0])
            logs.append(model.train_on_batch(x, y, return_dict=True))
        results["on_batch/same logs"] = equal_everywhere(logs)
        for name in logs[0]:
            results[f"on_batch/log/{name}"] = [of_batch[name] for of_batch in logs]
        results["on_batch/evaluated"] = model.evaluate(
            *uneven.rows_of({}, slice(rank, None, size)), batch_size=5, verbose=0
        )
        for i, weight in enumerate(model.get_weights()):
            results[f"on_batch/weight{i}"] = weight

        # Moving statistics are those of all ranks, frozen weights keep their bits, only rank 0 prints.
        def normalized():
            # With a `fit(*args, **kwargs)` of its own.
            layers = [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
            frozen = keras.layers.Dense(3, trainable=False)
            return uneven.TwoLosses([*layers, frozen])

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model, _ = train(replicas, {"make": normalized}, uneven.divided, verbose=2)
        results["prints"] = all(everywhere(bool(printed.getvalue()) == replicas.is_chief))
        state = [keras.ops.convert_to_numpy(v).tolist() for v in model.non_trainable_variables]
        results["same statistics"] = equal_everywhere(state)

        # Without `prepare`: an error on all ranks, at the first update that not all of them make.
        case, rows = uneven.CASES["plain"], uneven.some_without(rank, size)
        plain = uneven.compiled(**case)
        results["unprepared"] = raised(lambda: plain.fit(uneven.Batches(case, rows), shuffle=False, verbose=0))
        results["unprepared updates"] = int(plain.optimizer.iterations)
        results["unprepared all raised"] = all(everywhere("same number of updates" in results["unprepared"]))
        results["unprepared difference"] = replicas.largest_difference(plain)

        # Each rank predicts by itself, also in the middle of `fit`, and so it does with a model of its own.
        x, _ = uneven.data()
        teacher = uneven.compiled()
        own = [rows for rows in uneven.some_without(rank, size) if len(rows)]
        predicted = [model.predict(uneven.Batches({}, own), verbose=0)]
        if replicas.is_chief:
            predicted.append(model.predict(x, verbose=0))
        results["predicted"] = [len(p) for p in predicted]
        callbacks = [Predicts([model, teacher])] if replicas.is_chief else []
        case = {"make": normalized}
        model, _ = train(replicas, case, uneven.some_without, callbacks=callbacks, epochs=2)
        results["after predicting/difference"] = replicas.largest_difference(model)
        undisturbed, _ = train(replicas, case, uneven.some_without, epochs=2)
        pairs = zip(model.get_weights(), undisturbed.get_weights())
        results["after predicting/same weights"] = all(everywhere(all((a == b).all() for a, b in pairs)))
        results["predicted own"] = everywhere((sum(map(len, own)), len(predicted[0])))

        # Without a CrossShard, ranks would drift apart.
        model.compile("sgd", "mse")
        results["without"] = raised(lambda: model.fit(uneven.Batches({}, own), verbose=0))
        model.compile(ks.CrossShard("sgd", group_assignment=[[rank] for rank in range(size)]), "mse")
        results["apart"] = raised(lambda: model.fit(uneven.Batches({}, own), verbose=0))

        # Ranks that want different things all raise.
        callbacks = [StopEarly()] if rank == 0 else []
        results["stopped"] = raised(lambda: train(replicas, {}, uneven.divided, callbacks=callbacks))
        results["epochs"] = raised(lambda: train(replicas, {}, uneven.divided, epochs=1 + (rank == 0)))
        results["all raised"] = equal_everywhere([results["stopped"], results["epochs"]])
        if replicas.is_chief:
            np.savez(sys.argv[1], **results)


main()
