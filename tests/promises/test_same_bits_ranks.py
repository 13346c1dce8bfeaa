"""PyTorch: with virtual replicas the bits of a training run do not depend on the number of ranks."""

import functools
import json

import keras
import numpy as np
import pytest
import torch
from promises.problems import same_bits
from support import checks, launch, problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.models import buffers_of

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(300)]

CASES = [*same_bits.CASES, "bounded-SGD-plain", "wrapped-SGD-plain", "wrapped-SGD-skipped"]
# Of each kind of model, each optimizer and each option one; on two ranks a tree is one sum, and tests below run some
# cases there.
BY_DEFAULT = [
    *("attending-Adam-plain", "normalizing-SGD-accumulated", "normalizing-SGD-summed", "normalizing-Adam-divided"),
    *("constrained-SGD-plain", "masked-SGD-clipped", "recurrent-SGD-weighted", "bounded-SGD-plain"),
    "wrapped-SGD-skipped",
]
RUNS = [(4, case) for case in CASES] + [(n, case) for n in (2, 8) for case in [*BY_DEFAULT, "paired-SGD-weighted"]]


def alone(case):
    """Without ranks, in this process, with as many threads as it has."""
    return same_bits.trained_on(None, case)


@pytest.fixture(scope="module")
def on_ranks(request, tmp_path_factory):
    @functools.cache
    def on_ranks(num_ranks):
        file = tmp_path_factory.mktemp("bits") / "found.json"
        cases = [params["case"] for params in checks.selected(request) if params.get("num_ranks") == num_ranks]
        launch.torchrun("rank_same_bits.py", num_ranks, file, *cases, timeout=200)
        return json.loads(file.read_text())

    return on_ranks


@pytest.mark.parametrize(("num_ranks", "case"), some(RUNS, lambda run: run[0] == 4 and run[1] in BY_DEFAULT))
def test_one_sha256_for_any_number_of_ranks(num_ranks, case, on_ranks):
    assert on_ranks(num_ranks)[case] == alone(case)


def test_another_number_of_parts_would_change_the_bits():
    case = "attending-SGD-plain"
    with ks.data_parallel() as replicas:
        model = same_bits.model_of(case, virtual_replicas=4)
        same_bits.fit(model, case)
    replicas.close()
    assert same_bits.digest(*model.weights) != alone(case)["weights"]


def test_moving_statistics_change_by_the_mean_over_parts_that_have_rows():
    with ks.data_parallel() as replicas:
        found, expected = same_bits.moving_statistics()
    replicas.close()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_a_model_of_two_outputs_of_which_one_has_a_mask(tmp_path):
    case = "paired-SGD-weighted"
    launch.torchrun("rank_same_bits.py", 2, tmp_path / "found.json", case)
    assert json.loads((tmp_path / "found.json").read_text())[case] == alone(case)


@pytest.mark.exhaustive
def test_losses_wait_for_each_other_where_each_rank_has_one_part(tmp_path, monkeypatch):
    cases = ["masked-SGD-clipped", "paired-SGD-weighted"]
    settings = {"NUM_PARTS": "2", "BATCH_SIZE": "53"}  # in the last batch of the first rank only there is a row
    launch.torchrun("rank_same_bits.py", 2, tmp_path / "found.json", *cases, environment=settings)
    for name, value in settings.items():
        monkeypatch.setattr(same_bits, name, int(value))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {case: same_bits.trained_on.__wrapped__(None, case) for case in cases}


@pytest.mark.parametrize("num_parts, passes", [(1, 1), (2, 4)])
def test_parts_go_forward_once_more_only_where_a_rank_has_several(num_parts, passes):
    calls = []

    class Watching(keras.layers.Layer):
        def call(self, x):
            calls.append(x)
            return x

    with ks.data_parallel() as replicas:
        model = keras.Sequential([keras.Input((5, 7)), Watching(), keras.layers.Masking(), keras.layers.Dense(3)])
        model.compile(ks.CrossShard(keras.optimizers.SGD(0.1), virtual_replicas=num_parts), "mse")
    batch = np.ones((4, 5, 7), "float32"), np.ones((4, 5, 3), "float32")
    model.train_on_batch(*batch)
    calls.clear()
    model.train_on_batch(*batch)
    replicas.close()
    assert len(calls) == passes


@pytest.mark.exhaustive
def test_steps_are_not_compiled_which_is_said_once():
    case = "wrapped-SGD-plain"  # its forward pass, which PyTorch traces all the same, takes least
    with ks.data_parallel() as replicas:
        model = same_bits.model_of(case)
    model.jit_compile = True
    with problem.without_generated_code(), pytest.warns(UserWarning, match="steps are not compiled") as caught:
        same_bits.fit(model, case)
    replicas.close()
    assert len([w for w in caught if "not compiled" in str(w.message)]) == 1
    assert same_bits.digest(*model.weights, *buffers_of(model)) == alone(case)["weights"]


def test_a_call_on_one_batch_needs_no_fit_before():
    case = "attending-SGD-plain"
    x, y, weights = same_bits.data_of(case)
    ends = []
    for in_fit in (True, False):
        with ks.data_parallel() as replicas:
            model = same_bits.model_of(case)
        if in_fit:
            model.fit(x, y, sample_weight=weights, batch_size=len(x), shuffle=False, verbose=0)
        else:
            model.train_on_batch(x, y, sample_weight=weights)
        replicas.close()
        ends.append(same_bits.digest(*model.weights))
    assert ends[0] == ends[1]


def test_slices_are_updated_with_the_arithmetic_of_keras():
    ends = []
    for more in ({"shard_state": True}, {"fused": False}, {}):
        with ks.data_parallel() as replicas:
            model = same_bits.model_of("normalizing-Adam-plain", **more)
        same_bits.fit(model, "normalizing-Adam-plain")
        replicas.close()
        ends.append(same_bits.digest(*model.weights))
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.exhaustive
def test_neither_steps_nor_initial_weights_depend_on_the_number_of_threads():
    case = "recurrent-SGD-plain"
    ends, before = [], torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        with ks.data_parallel() as replicas:
            matrix = keras.initializers.Orthogonal(seed=1)((64, 256))
            found = same_bits.trained(replicas, case)
        replicas.close()
        ends.append((same_bits.digest(matrix), found))
        assert torch.get_num_threads() == num_threads
        # It could be otherwise.
        plain = same_bits.digest(keras.initializers.Orthogonal(seed=1)((64, 256)))
        assert (plain == ends[0][0]) == (num_threads == 1)
    torch.set_num_threads(before)
    assert ends[0] == ends[1] == ends[2]


def test_ranks_with_different_numbers_of_threads(tmp_path):
    case = "attending-SGD-plain"
    launch.torchrun("rank_same_bits.py", 2, tmp_path / "found.json", case, environment={"THREADS_OF_RANKS": "1,3"})
    assert json.loads((tmp_path / "found.json").read_text())[case] == alone(case)


@pytest.mark.parametrize(
    "case",
    some(
        [
            "recurrent-SGD-plain",
            "constrained-SGD-plain",
            "masked-SGD-plain",
            "recurrent-SGD-weighted",
            "paired-SGD-weighted",
        ],
        lambda case: case not in ("recurrent-SGD-plain", "masked-SGD-plain"),
    ),
)
def test_values_are_those_of_the_optimizer_without_parts(case):
    # Without replicas Keras' loss multiplies the mask into the weights in place, before metrics see them.
    but = ("sparse_categorical_accuracy",) if case.startswith("masked") else ()
    same_bits.assert_values_are_those_without_parts(case, None, same_bits.NUM_PARTS, but)


@pytest.mark.parametrize("kept", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_that_stops_on_four_ranks_goes_on_with_fewer(kept, tmp_path):
    case = "dropping-Adam-plain"
    whole = same_bits.restarted_on(None, case, tmp_path / "whole")
    folder = tmp_path / "stopped"
    folder.mkdir()
    launch.torchrun("rank_same_bits.py", 4, folder, case, 5)
    assert (folder / "backup").exists() and not (folder / "found.json").exists()
    launch.torchrun("rank_same_bits.py", kept, folder, case, -1)
    assert ks.callbacks.first_difference(tmp_path / "whole" / "prints", folder / "prints") is None
    assert json.loads((folder / "found.json").read_text()) == whole
