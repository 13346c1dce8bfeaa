"""One process of a `jax.distributed` job that is given the whole data, as the others are.

Argument: a file, to which process 0 writes what came of it.
"""

import functools
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


def one_process_assigns(scope, model, fit):
    """Weights or a rate of its own: all go on with those of process 0, of which one line tells; nobody waits."""
    weights = [2 * weight for weight in model.get_weights()]
    kernel = model.trainable_variables[0].path
    for of in range(2):
        if scope.process_id == of:
            model.set_weights(weights)
            model.optimizer.learning_rate = 0.02 + 0.01 * of
        begun = []
        note = lambda batch, logs: batch or begun.append(model.get_weights())  # noqa: E731, B023 - called at once
        notes = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
        said = processes.gather_objects(warned(functools.partial(fit, epochs=1, callbacks=[notes])))
        assert [len(words) for words in said] == [1, 0] and kernel in said[0][0], said
        assert "learning_rate" in said[0][0] and "different values of" in said[0][0], said
        assert (begun[0][0] == weights[0]).all() == (of == 0)
        assert scope.largest_difference(model) == 0
        weights = [2 * weight for weight in model.get_weights()]
    # In the middle of a `fit`, between two epochs.
    slower = lambda epoch, logs: scope.process_id and setattr(model.optimizer, "learning_rate", 0.03)  # noqa: E731
    callback = keras.callbacks.LambdaCallback(on_epoch_end=slower)
    said = processes.gather_objects(warned(lambda: fit(epochs=2, callbacks=[callback])))
    assert [len(words) for words in said] == [1, 0] and "values of sgd/learning_rate on some" in said[0][0], said
    # After the last epoch, too.
    said = processes.gather_objects(warned(lambda: fit(epochs=1)))
    assert [len(words) for words in said] == [1, 0], said
    assert scope.largest_difference(model) == 0


def plain_calls_that_save_and_load(scope, model, fit):
    """By every process or by one, also in a callback; what one alone loads is process 0's in the end."""
    folder = pathlib.Path(sys.argv[1]).parent

    def save(*_, **__):
        model.save(folder / "every.keras")
        if scope.is_chief:
            model.save_weights(folder / "one.weights.h5")

    fit(epochs=1, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=save)])
    weights, updates = model.get_weights(), int(model.optimizer.iterations)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    fit(epochs=1)
    for name in ("every.keras", "one.weights.h5"):
        if scope.is_chief:
            model.load_weights(folder / name)
        begun = []
        note = lambda epoch, logs, begun=begun: begun.append(model.get_weights())  # noqa: E731
        said = processes.gather_objects(
            warned(functools.partial(fit, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)]))
        )
        assert [len(words) for words in said] == [1, 0] and "iteration" in said[0][0], said
        assert int(model.optimizer.iterations) == updates + 8, (model.optimizer.iterations, updates)
        assert scope.largest_difference(model) == 0
    # Into a model that has no optimizer state yet.
    keras.utils.set_random_seed(5)  # or JAX refuses to make variables that differ
    with ks.data_parallel() as other:
        fresh = whole_data.problem.model()
        fresh.compile(ks.CrossShard(whole_data.problem.sgd_momentum()), "mse")
    if other.is_chief:
        fresh.load_weights(folder / "every.keras")
    fresh.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    assert int(fresh.optimizer.iterations) == updates + 1 and other.largest_difference(fresh) == 0
    assert not (fresh.get_weights()[0] == weights[0]).all()


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

    one_process_assigns(scope, model, lambda **more: fit(X, Y, **more))
    plain_calls_that_save_and_load(scope, model, lambda **more: fit(X, Y, shuffle=False, **more))

    refused(lambda: fit(X + odd, Y), ValueError, "differ from those of process 0 on process 1. Load the same data")
    fewer = 61 - 16 * odd
    refused(lambda: fit(X[:fewer], Y[:fewer], shuffle=False), ValueError, "numbers of batches that differ")
    x, y = ks.shard_data(X, Y)
    some = (x, y) if odd else (X, Y)
    refused(lambda: fit(*some), ValueError, "process 0: the whole data, process 1: a separate part")
    # Parts of its own: from `shard_data`, also where a part of them is split off, and where somebody says so.
    for more in ({"validation_split": 0.2}, {"validation_data": whole_data.VALIDATION}):
        history = model.fit(x, y, batch_size=8, verbose=0, **more).history
        assert processes.gather_objects(history)[0] == history
    for call in (lambda: model.predict(x, verbose=0), lambda: ks.prepare(model, gather=False).predict(X, verbose=0)):
        refused(call, RuntimeError, "`predict` needs the same data")
    ks.prepare(model, auto_shard=False, gather=True)
    assert warned(lambda: fit(X[odd::2], Y[odd::2])) == []
    said = processes.gather_objects(warned(lambda: fit(X, Y)))
    assert [len(words) for words in said] == [1, 0] and "repeat the same work" in said[0][0], said
    # In the middle of an epoch, when Keras has taken the weights out of the model.
    ks.prepare(model, auto_shard=True)
    refused(lambda: fit(X[: 61 - odd], Y[: 61 - odd], shuffle=False), ValueError, "batches of [13, 12] rows")
    generator = ((X[:8] + bool(odd and i == 2), Y[:8]) for i in range(9))
    refused(
        lambda: model.fit(generator, steps_per_epoch=4, verbose=0), ValueError, "on process 1, in batch 2 (the first is"
    )
    # One that stops by itself, at the end of a batch and of an epoch.
    for name, other in (("on_train_batch_end", "takes the next batch"), ("on_epoch_end", "starts an epoch")):
        stops = keras.callbacks.LambdaCallback(**{name: lambda *_, **logs: setattr(model, "stop_training", bool(odd))})
        words = f"process 0 {other} of a prepared model, process 1 leaves `fit` of a prepared model"
        refused(lambda stops=stops: fit(X, Y, epochs=2, callbacks=[stops]), ValueError, words)
    scope.close()


if __name__ == "__main__":
    main()
