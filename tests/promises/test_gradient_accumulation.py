"""`gradient_accumulation_steps`: the update of the larger batch, for the communication of one step."""

import functools
import itertools
import re
import warnings

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import accumulating
from support import launch, problem
from support.reducing import plant
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import runtime
from keras_shardopt.update.gradient_sums import GradientSums

in_one_process = pytest.mark.backends("tensorflow", "jax")
NUMBERS = accumulating.NUMBERS if BACKEND != "torch" else [(1, 2), (1, 3)]


def arrays(variables):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in variables]


def trained(case, num_replicas, num_steps, prepared=None, epochs=1, **arguments):
    """Weights and shared state after training in windows on the replicas of this process."""
    make, _, data = accumulating.CASES[case]
    prepared = BACKEND == "jax" and num_replicas > 1 if prepared is None else prepared
    with ks.data_parallel(num_replicas, prepare=False) as replicas:
        optimizer = ks.CrossShard(make(), gradient_accumulation_steps=num_steps, **arguments)
        model = accumulating.compiled(case, optimizer)
        if prepared:
            ks.prepare(model)
        model.fit(*data(), batch_size=problem.BATCH_SIZE, shuffle=False, epochs=epochs, verbose=0)
        assert replicas.largest_difference(model) == 0
        found = model.get_weights(), arrays(optimizer._shared_variables)
    replicas.close()
    return found


@pytest.mark.parametrize(("num_replicas", "num_steps"), some(NUMBERS, [(2, 3), (1, 3)], "jax", "tensorflow"))
def test_windows_equal_larger_batches(num_replicas, num_steps):
    accumulating.check("momentum", num_steps, *trained("momentum", num_replicas, num_steps))


# On TensorFlow gradients of an embedding are rows.
@pytest.mark.parametrize(
    "case",
    some(accumulating.OTHERS, ["embedding" if BACKEND == "tensorflow" else "updates counted"], "jax", "tensorflow"),
)
def test_whatever_is_inside_sees_the_gradient_of_the_window(case):
    num_replicas = 1 if BACKEND == "torch" else 2
    accumulating.check(case, 3, *trained(case, num_replicas, 3))


@in_one_process
@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
def test_each_replica_is_clipped_once_in_a_window(num_replicas):
    weights, _ = trained("momentum", num_replicas, 3, replica_clipnorm=accumulating.CLIPNORM)
    expected = accumulating.clipped_in_numpy(num_replicas, 3)
    assert problem.relative_difference(weights, expected) <= 2 * problem.TOLERANCE
    assert problem.relative_difference(expected, accumulating.on_larger_batches("momentum", 3)[0]) > 1e-2


@in_one_process
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_window_goes_on_in_the_next_epoch():
    weights, state = trained("momentum", 2, 8, epochs=2)
    assert state[0] == 3
    model = problem.model()
    model.compile(problem.sgd_momentum(), "mse")
    x, y = (np.concatenate([a, a]) for a in accumulating.rows())
    model.fit(x, y, batch_size=8 * problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(weights, model.get_weights()) <= problem.TOLERANCE


@pytest.mark.backends("jax")
def test_without_prepare_it_is_right_and_says_what_is_not_saved():
    with pytest.warns(UserWarning, match=r"each micro-batch communicates. Call `keras_shardopt.prepare\(model\)`"):
        found = trained("momentum", 2, 3, prepared=False)
    accumulating.check("momentum", 3, *found)


@pytest.mark.backends("jax")
def test_gradients_that_are_said_to_be_global_are_those_of_the_whole_batch():
    with pytest.warns(UserWarning, match=r"each micro-batch communicates. Leave `gradients='global'` out"):
        found = trained("momentum", 2, 3, prepared=True, gradients="global")
    accumulating.check("momentum", 3, *found)


@in_one_process
@pytest.mark.parametrize("num_replicas", some([1, 2, 4], [2]))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_batches_that_do_not_divide_are_a_mean_over_micro_steps(num_replicas):
    """After `prepare` each micro-batch is exact, and the window is the mean of them."""
    x, y = (a[:61] for a in problem.data(4))  # 16, 16, 16, 13 rows

    with ks.data_parallel(num_replicas) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(keras.optimizers.SGD(0.5), gradient_accumulation_steps=2), "mse")
        ks.prepare(model).fit(x, y, batch_size=16, shuffle=False, verbose=0)
    replicas.close()
    weights = [w.astype("float64") for w in problem.start_weights()]
    for window in ((0, 16, 32), (32, 48, 61)):
        grads = [problem.gradients_in_numpy(weights, x[a:b], y[a:b]) for a, b in itertools.pairwise(window)]
        for weight, first, second in zip(weights, *grads):
            weight -= 0.5 * (first + second) / 2
    assert problem.relative_difference(model.get_weights(), weights) <= problem.TOLERANCE


# -- what is communicated ----------------------------------------------------------------------------------------


@pytest.mark.backends("tensorflow")
def test_tensorflow_reduces_once_in_a_window(monkeypatch):
    from tensorflow.python.distribute import distribute_lib

    sizes = []
    real = distribute_lib.StrategyExtendedV2.batch_reduce_to

    def counting(self, op, pairs, *args, **kwargs):
        sizes.append(len(pairs))
        return real(self, op, pairs, *args, **kwargs)

    monkeypatch.setattr(distribute_lib.StrategyExtendedV2, "batch_reduce_to", counting)
    with ks.data_parallel(2, prepare=False) as replicas:
        model = accumulating.compiled("momentum", ks.CrossShard("sgd", gradient_accumulation_steps=3), run_eagerly=True)
    model.fit(*accumulating.rows(), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    replicas.close()
    assert sizes == [4] * (accumulating.NUM_MICRO_STEPS // 3)


def collectives(num_replicas, prepared):
    """The shapes that each collective of a compiled step moves, by whether it is inside a branch."""
    import jax
    from keras.src.backend.jax.trainer import _distribute_data

    with ks.data_parallel(num_replicas, prepare=False) as replicas:
        optimizer = ks.CrossShard("adam", gradient_accumulation_steps=3, on_nonfinite="skip")
        model = accumulating.compiled("momentum", optimizer)
        if prepared:
            ks.prepare(model)
        x, y = problem.data(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
        state = model._get_jax_state(
            trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, metrics_variables=True
        )
        shardings = (None, model._get_state_sharding_spec())
        step = jax.jit(model.train_step, donate_argnums=0, out_shardings=shardings)
        text = step.lower(state, _distribute_data((x, y))).compile().as_text()
    replicas.close()
    branches = set(re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", text))
    branches |= {
        name for group in re.findall(r"branch_computations=\{([^}]*)\}", text) for name in re.split(r"[%, ]+", group)
    }
    found, computation = {"in a branch": [], "always": []}, None
    # What a branch calls is in a branch too.
    called = {}
    for line in text.splitlines():
        if line and not line.startswith(" ") and "{" in line:
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        for name in re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)", line):
            called.setdefault(computation, set()).add(name)
        for name in re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line):
            called.setdefault(computation, set()).add(name)
    todo = list(branches)
    while todo:
        for name in called.get(todo.pop(), ()):
            if name not in branches:
                branches.add(name)
                todo.append(name)
    kinds = r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    for line in text.splitlines():
        if line and not line.startswith(" ") and "{" in line:
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        if re.search(r" " + kinds, line):
            result = re.split(kinds, line.split(" = ", 1)[1])[0]
            where = "in a branch" if computation in branches else "always"
            found[where] += [
                int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\w+\[([\d,]*)\]", result)
            ]
    return found


NUM_PARAMETERS = sum(w.size for w in problem.start_weights())


@pytest.mark.backends("jax")
@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
def test_the_compiled_step_of_jax_communicates_gradients_in_the_branch_only(num_replicas):
    found = collectives(num_replicas, prepared=True)
    # The loss, and numbers of rows: scalars of the trainer's.
    assert all(size == 1 for size in found["always"]), found
    assert len(found["always"]) <= 4
    # The gradients, and two or three digits per replica of the variable that is not finite.
    assert sum(found["in a branch"]) == NUM_PARAMETERS + 3 * num_replicas, found


@pytest.mark.backends("jax")
@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_count_can_fail():
    assert sum(collectives(2, prepared=False)["always"]) >= NUM_PARAMETERS


# -- planted faults ----------------------------------------------------------------------------------------------


def _not_cleared(variables, values, starts):
    real_add_to(variables, values, False if BACKEND == "torch" else keras.ops.zeros((), "bool"))


def _not_divided(self, i, total):
    return total


real_add_to = runtime.add_n


@pytest.mark.parametrize("fault", ["not cleared", "not divided"])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_planted_fault_turns_the_check_red(monkeypatch, fault):
    if fault == "not cleared":
        monkeypatch.setattr(runtime, "add_n", _not_cleared)
    else:
        monkeypatch.setattr(GradientSums, "_mean", _not_divided)
    with pytest.raises(AssertionError):
        accumulating.check("momentum", 2, *trained("momentum", 1, 2))


@in_one_process
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_lost_reduction_turns_the_check_red(monkeypatch):
    # On JAX the sums are per replica, and leaving out the reduction leaves replicas with weights of their own.
    plant(monkeypatch, lambda grads, *_: list(grads))
    with pytest.raises(AssertionError):
        accumulating.check("momentum", 2, *trained("momentum", 2, 2))


# -- ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the ranks of each number have trained, one spawn of workers for all cases but the compiled one."""

    @functools.cache
    def run(num_replicas, *names):
        file = tmp_path_factory.mktemp("ranks") / "results.npz"
        try:
            launch.torchrun("rank_accumulation.py", num_replicas, file, *names)
        except launch.WorkersFailed as failure:
            return failure
        return np.load(file)

    def results(num_replicas, *names):
        outcome = run(num_replicas, *names)
        if isinstance(outcome, launch.WorkersFailed):
            pytest.fail(str(outcome), pytrace=False)
        return outcome

    return results


def of_ranks(results, name):
    weights = [results[key] for key in results.files if key.startswith(f"{name}/weight")]
    assert results[f"{name}/difference"] == 0
    return weights


@pytest.mark.backends("torch")
@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
def test_ranks_equal_larger_batches(ranks, num_replicas):
    results = ranks(num_replicas)
    for num_steps in (2, 3):
        accumulating.check("momentum", num_steps, of_ranks(results, f"momentum/{num_steps}"), None)
    for case in accumulating.OTHERS:
        accumulating.check(case, 3, of_ranks(results, f"{case}/3"), None)
    clipped = of_ranks(results, "replica clip/3")
    expected = accumulating.clipped_in_numpy(num_replicas, 3)
    assert problem.relative_difference(clipped, expected) <= 2 * problem.TOLERANCE


@pytest.mark.backends("torch")
@pytest.mark.parametrize("num_replicas", some([2, 4], [2]))
def test_ranks_communicate_once_in_a_window(ranks, num_replicas):
    # With which of 4 gradients there are, whether the rank goes on or ends, 20 marks of what it trains and 3 flags of
    # buckets; and once more when `fit` ends.
    num_updates = accumulating.NUM_MICRO_STEPS // 3
    np.testing.assert_array_equal(ranks(num_replicas)["momentum/3/calls"], [NUM_PARAMETERS + 29] * (num_updates + 1))


@pytest.mark.backends("torch")
@pytest.mark.exhaustive
def test_a_compiled_step_of_ranks(ranks):
    accumulating.check("momentum", 3, of_ranks(ranks(2, "compiled"), "compiled/3"), None)
