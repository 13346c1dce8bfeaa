"""PyTorch: everything in rank_shards.py, on two, three and four ranks, in one spawn of workers each."""

import numpy as np
import pytest
from support import checks, launch, problem
from support.suites import some

import keras_shardopt as ks

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(600)]

SOURCE = launch.SCRIPTS / "rank_shards.py"
CHECKS = checks.names_in(SOURCE)
# All on three, which divides nothing; elsewhere what may depend on the number, and `fit` on two.
AGAIN = ["wire_bytes_are_those_of_one_reduction", "files_travel_between_numbers_of_ranks"]
FIT, REPORT = "fit_trains_as_one_process_does", "the_report_says_what_is_held"  # batches divide by two, not by three
WHOLE = "whole_variables_are_updated_whole"
LONG = (WHOLE, "the_checks_can_fail", "updates_of_other_optimizers_of_keras_are_those_of_one_process")
RUNS = [(2, name) for name in [*AGAIN, FIT, WHOLE]]
RUNS += [(3, name) for name in CHECKS if name != FIT]
RUNS += [(4, name) for name in [*AGAIN, REPORT]]


def is_default(run):
    return (run[0] == 3 and run[1] not in LONG) or run == (2, FIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where files of each number of ranks lie, those of one process first."""
    made = tmp_path_factory.mktemp("shards")
    for name, optimizer in one_process_optimizers().items():
        np.savez(made / f"{name}-1.npz", **saved(optimizer))
    return made


def one_process_optimizers():
    import keras

    made = {
        "adam": keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
        "lamb": keras.optimizers.Lamb(0.01),
    }
    for name, inner in made.items():
        weights = weights_of_the_checks()
        optimizer = ks.CrossShard(inner, shard_state=True)
        for step in range(3):
            random = np.random.default_rng(step)
            grads = [keras.ops.convert_to_tensor(random.normal(size=w.shape).astype("float32")) for w in weights]
            optimizer.apply(grads, weights)
        made[name] = optimizer
    return made


def weights_of_the_checks():
    import keras

    shapes = {"embedding/table": (101, 7), "hidden/kernel": (7, 11), "hidden/bias": (11,), "out/kernel": (11, 3)}
    made = []
    for path, shape in [*shapes.items(), ("top/gain", ())]:
        scope, name = path.split("/")
        with keras.name_scope(scope):
            made.append(keras.Variable(np.ones(shape, "float32"), name=name))
    return made


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


@pytest.fixture(scope="module")
def runs(request, folder):
    return checks.Runs(request, SOURCE, folder)


@pytest.mark.parametrize(("num_ranks", "name"), some(RUNS, is_default))
def test_on_ranks(runs, num_ranks, name):
    runs.verify(name, num_ranks)


@pytest.mark.parametrize("num_saved", some([1, 2, 3, 4], [1, 3]))
def test_files_of_any_number_of_ranks_fit_one_process(folder, runs, num_saved):
    for number in {3, num_saved} - {1}:
        runs.verify("files_travel_between_numbers_of_ranks", number)
    for name, optimizer in one_process_optimizers().items():
        arrays = dict(np.load(folder / f"{name}-{num_saved}.npz"))
        for loading in (optimizer, optimizer.inner):
            loading.load_own_variables(arrays)
            found = saved(loading)
            assert list(found) == list(arrays)
            assert all((found[key] == array).all() for key, array in arrays.items())


def test_one_process_updates_as_without():
    import keras

    weights = []
    for arguments in ({}, {"shard_state": True}):
        model = problem.model()
        model.compile(ks.CrossShard(keras.optimizers.Adam(0.01), **arguments), "mse")
        model.fit(*problem.data(3), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert all((a == b).all() for a, b in zip(*weights))
