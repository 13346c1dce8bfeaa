"""One process of a `jax.distributed` job that is given the whole data, as the others are.

Argument: a file, to which process 0 writes what came of it.
"""

import pathlib
import pickle
import sys
import warnings

import keras
from promises.problems import whole_data
from promises.problems.whole_data import BATCH, X, Y
from support.checks import refused

import keras_shardopt as ks
from keras_shardopt.backends.active import processes


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def main():
    warnings.filterwarnings("ignore")
    keras.distribution.initialize()
    with ks.data_parallel() as scope:
        model = whole_data.compiled(ks.CrossShard)
    odd = scope.process_id
    found = whole_data.outcomes(model, process_id=odd)
    assert scope.largest_difference(model) == 0
    everyones = processes.gather_objects(found)
    if scope.is_chief:
        (of_first, *first), (of_second, *second) = everyones
        for name, (history, weights, drawn) in of_first.items():
            same = of_second[name][0] == history and of_second[name][2] != drawn
            assert same and all((a == b).all() for a, b in zip(weights, of_second[name][1])), name
        assert first[0] == second[0] and (first[1] == second[1]).all()
        pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(found))

    def fit(*data, **more):
        return model.fit(*data, batch_size=BATCH, verbose=0, **more)

    refused(lambda: fit(X + odd, Y), ValueError, "other first batches than process 0 on process 1. Load the same data")
    fewer = 61 - 16 * odd
    refused(lambda: fit(X[:fewer], Y[:fewer], shuffle=False), ValueError, "other numbers of batches")
    x, y = ks.shard_data(X, Y)
    some = (x, y) if odd else (X, Y)
    refused(lambda: fit(*some), ValueError, "process 0: the whole data, process 1: a part of its own")
    # Parts of its own: from `shard_data`, also where a part of them is split off, and where somebody says so.
    for more in ({"validation_split": 0.2}, {"validation_data": whole_data.VALIDATION}):
        history = model.fit(x, y, batch_size=8, verbose=0, **more).history
        assert processes.gather_objects(history)[0] == history
    for call in (lambda: model.predict(x, verbose=0), lambda: ks.prepare(model, gather=False).predict(X, verbose=0)):
        refused(call, RuntimeError, "`predict` must be that of a prepared model")
    ks.prepare(model, auto_shard=False, gather=True)
    assert warned(lambda: fit(X[odd::2], Y[odd::2])) == []
    said = processes.gather_objects(warned(lambda: fit(X, Y)))
    assert [len(words) for words in said] == [1, 0] and "repeat each other's work" in said[0][0], said
    # In the middle of an epoch, when Keras has taken the weights out of the model.
    ks.prepare(model, auto_shard=True)
    refused(lambda: fit(X[: 61 - odd], Y[: 61 - odd], shuffle=False), ValueError, "batches of [13, 12] rows")
    # One that stops by itself, at the end of a batch and of an epoch.
    for name, other in (("on_train_batch_end", "takes the next batch"), ("on_epoch_end", "starts an epoch")):
        stops = keras.callbacks.LambdaCallback(**{name: lambda *_, **logs: setattr(model, "stop_training", bool(odd))})
        words = f"process 0 {other} of a prepared model, process 1 leaves `fit` of a prepared model"
        refused(lambda stops=stops: fit(X, Y, epochs=2, callbacks=[stops]), ValueError, words)
    scope.close()


if __name__ == "__main__":
    main()
