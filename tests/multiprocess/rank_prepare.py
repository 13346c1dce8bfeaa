"""Trains on unequal parts of each batch after `prepare(model)`, on the ranks that torchrun started.

Argument: the file to write.
"""

import contextlib
import io
import sys
import warnings

import keras
import numpy as np
from support import uneven

import keras_shardopt as ks

warnings.filterwarnings("ignore")


def unequal_parts():
    for name, case in uneven.CASES.items():
        yield name, uneven.divided, case
    yield "plain", uneven.some_without, {}
    yield "mask", uneven.some_without, uneven.CASES["mask"]
    yield "divided by weights", uneven.all_on_the_last, uneven.CASES["divided by weights"]


def train(replicas, case, division, **fit):
    rows = division(replicas.replica_id, replicas.num_replicas)
    keras.utils.set_random_seed(replicas.replica_id)
    model = uneven.compiled(**case)
    if replicas.replica_id:
        model.set_weights([w + 1 for w in model.get_weights()])  # rank 0's are taken
    ks.prepare(ks.prepare(model))
    given = {"verbose": 0, "shuffle": False, **case.get("fit", {}), **fit}
    history = model.fit(uneven.Batches(case, rows), validation_data=uneven.Batches(case, rows), **given)
    return model, history.history


def equal_everywhere(values):
    """Whether all ranks have the same."""
    import torch.distributed as dist

    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    return all(other == everywhere[0] for other in everywhere)


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


def main():
    results = {}
    with ks.data_parallel() as replicas:
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

        clipped = {"around": {"replica_clipnorm": 0.9}}
        rows = [np.split(batch, [4 * r for r in range(1, size)])[rank] for batch in uneven.batches()]
        model, _ = train(replicas, clipped, lambda *_: rows)
        for i, weight in enumerate(model.get_weights()):
            results[f"clipped/weight{i}"] = weight

        # One batch at a time, the last rank without rows.
        model = ks.prepare(uneven.compiled())
        for batch in uneven.batches():
            x, y = uneven.rows_of({}, batch if rank == 0 else batch[:0])
            logs = model.train_on_batch(x, y, return_dict=True)
        results["on_batch/same logs"] = equal_everywhere(logs)
        results["on_batch/evaluated"] = model.evaluate(
            *uneven.rows_of({}, slice(rank, None, size)), batch_size=5, verbose=0
        )
        for i, weight in enumerate(model.get_weights()):
            results[f"on_batch/weight{i}"] = weight

        # Moving statistics are those of all ranks, frozen weights keep their bits, only rank 0 prints.
        def normalized():
            layers = [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
            frozen = keras.layers.Dense(3, trainable=False)
            return keras.Sequential([*layers, frozen])

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model, _ = train(replicas, {"make": normalized}, uneven.divided, verbose=2)
        results["prints"] = equal_everywhere(bool(printed.getvalue()) == replicas.is_chief)
        state = [keras.ops.convert_to_numpy(v).tolist() for v in model.non_trainable_variables]
        results["same statistics"] = equal_everywhere(state)

        # Without `prepare`: an error on all ranks, at the first update that not all of them make.
        case, rows = uneven.CASES["plain"], uneven.some_without(rank, size)
        plain = uneven.compiled(**case)
        results["unprepared"] = raised(lambda: plain.fit(uneven.Batches(case, rows), shuffle=False, verbose=0))
        results["unprepared updates"] = int(plain.optimizer.iterations)
        results["unprepared all raised"] = equal_everywhere("same number of updates" in results["unprepared"])
        results["unprepared difference"] = replicas.largest_difference(plain)

        # Ranks that want different things all raise.
        callbacks = [StopEarly()] if rank == 0 else []
        results["stopped"] = raised(lambda: train(replicas, {}, uneven.divided, callbacks=callbacks))
        results["epochs"] = raised(lambda: train(replicas, {}, uneven.divided, epochs=1 + (rank == 0)))
        results["all raised"] = equal_everywhere([results["stopped"], results["epochs"]])
        if replicas.is_chief:
            np.savez(sys.argv[1], **results)


main()
