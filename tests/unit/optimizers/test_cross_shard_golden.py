"""Numbers of TensorFlow 1's `CrossShardOptimizer`, with replicas in threads.

There the loss is scaled by 1/size and gradients are summed; here they are averaged. What the inner optimizer gets is
the same, so that is what is compared.
"""

import keras
import numpy as np
import pytest
from keras import ops
from support import golden
from support.golden import TF1Momentum
from support.reducing import plant
from support.worlds import FakeWorld, reduced

import keras_shardopt as ks

FILE = golden.load("cross_shard")
CONSTRUCTION = golden.cases("cross_shard", "construction_cases")
COMPUTE = golden.cases("cross_shard", "compute_gradients_cases")
STEPS = golden.cases("cross_shard", "emulated_step_cases")
APPLY = golden.cases("cross_shard", "apply_cases")

# Reasons are for readers; each case named here is covered by a test of its own where one is named.
LEFT_OUT = {
    "reduction/'mean'": 'refused there; here "mean" and "sum" are the plain names (test_plain_names_of_reductions)',
    "opt/string": "refused there; here the name of an optimizer is accepted, as `compile` does",
    "names_and_unchecked_group_assignment": "there groups were looked at in compute_gradients only, and the default "
    "name was CamelCase; here in the constructor (test_golden_groups_that_are_refused), and names are Keras'",
    "weighted_mean/shards0": "there are no 0 replicas here; the original took them for one",
    "weighted_sum/shards0": "as before",
    "nested_shard_context": "an error of `tpu_shard_context`, which does not exist here",
    "minimize_outside_context": "is a pass with a warning; test_golden_outside_a_context has the numbers",
}
# The original took the ids for a set, and let these through.
DUPLICATES = [id for id in COMPUTE if "[0, 1], [2, 3], [0, 1], [2, 3]" in id or "[[0, 1], [1, 0]]" in id]
REFUSED = [id for id, case in COMPUTE.items() if case["error"] and id not in LEFT_OUT]
ACCEPTED = [id for id in COMPUTE if id not in [*LEFT_OUT, *REFUSED, *DUPLICATES]]


def groups_of(case):
    # JSON knows no tuples.
    written = case.get("group_assignment_python")
    return case["group_assignment"] if written is None else eval(written)


def test_every_case_is_tested_or_left_out_with_a_reason():
    tested = {*ACCEPTED, *REFUSED, *DUPLICATES, *STEPS, *REDUCTIONS, "opt/nested_cross_shard"}
    tested |= {"apply_all_none", "apply_with_ragged_groups"}
    everything = {*CONSTRUCTION, *COMPUTE, *STEPS, *APPLY}
    assert everything == tested | set(LEFT_OUT)
    assert not tested & set(LEFT_OUT)


REDUCTIONS = [id for id in CONSTRUCTION if id.startswith("reduction/") and id not in LEFT_OUT]


@pytest.mark.parametrize("id", REDUCTIONS)
def test_golden_reductions(id):
    case = CONSTRUCTION[id]
    arguments = {} if case.get("is_default") else {"reduction": case["reduction"]}
    if case["accepted"]:
        stored = ks.CrossShard("sgd", **arguments).reduction
        assert f"weighted_{stored}" == case.get("stored", case["reduction"])
    else:
        with pytest.raises(ValueError, match="`reduction`"):
            ks.CrossShard("sgd", **arguments)


def test_plain_names_of_reductions():
    assert ks.CrossShard("sgd", "mean").reduction == "mean"
    assert ks.CrossShard("sgd", "sum").reduction == "sum"


def test_golden_nesting():
    assert CONSTRUCTION["opt/nested_cross_shard"]["accepted"]
    ks.CrossShard(ks.CrossShard("sgd"))


@pytest.mark.parametrize("id", REFUSED)
def test_golden_groups_that_are_refused(id, monkeypatch):
    case = COMPUTE[id]
    assert case["error"] == {"type": "ValueError"}
    world = FakeWorld(case["num_shards"] or 1).hold(monkeypatch)
    with pytest.raises(ValueError, match="`group_assignment` must") as caught:
        optimizer = ks.CrossShard("sgd", case["reduction"], groups_of(case))
        world.run(lambda _: reduced(optimizer, [ops.ones(2)], [keras.Variable([0.0, 0.0])]))
    assert "Received: group_assignment=" in str(caught.value)


@pytest.mark.parametrize("id", DUPLICATES)
def test_duplicates_are_refused_where_the_original_let_them_through(id):
    case = COMPUTE[id]
    assert case["error"] is None
    with pytest.raises(ValueError, match="every replica once"):
        ks.CrossShard("sgd", case["reduction"], groups_of(case))


@pytest.mark.parametrize("id", ACCEPTED)
def test_golden_gradients(id, monkeypatch):
    """Every replica has the same gradient, so what the inner optimizer gets is the original's, summed over a group."""
    case = COMPUTE[id]
    num_shards, groups = case["num_shards"] or 1, groups_of(case)
    size = len(groups[0]) if groups else num_shards
    world = FakeWorld(num_shards).hold(monkeypatch)
    variables = [keras.Variable([1.0, 1.0]), keras.Variable([1.0])]
    optimizer = ks.CrossShard("sgd", case["reduction"], groups)

    def of_replica(replicas):
        grads = [ops.convert_to_tensor(np.array(case["unscaled_gradient"], "float32")), None]
        return reduced(optimizer, grads, variables)

    for grad, none in world.run(of_replica):
        golden.assert_close(grad, np.array(case["result"]["gradient"]) * size)
        assert keras.backend.standardize_dtype(grad.dtype) == case["result"]["dtype"]
        assert (none is None) == case["result"]["none_kept"]


@pytest.mark.parametrize("reduction", ["weighted_mean", "weighted_sum"])
def test_golden_outside_a_context(reduction):
    """One replica. There it also warned; here a lone replica is nothing to warn of."""
    case = COMPUTE[f"{reduction}/outside_context/groups_null"]
    unscaled = ops.convert_to_tensor(np.array(case["unscaled_gradient"], "float32"))
    weight, unused = keras.Variable([1.0, 1.0]), keras.Variable([1.0])
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), reduction)
    (grad, _), (none, _) = optimizer.compute_gradients(lambda: ops.sum(weight * unscaled), [weight, unused])
    golden.assert_close(grad, case["result"]["gradient"])
    # JAX has zeros for what a loss does not depend on.
    assert none is None or not np.any(ops.convert_to_numpy(none))
    golden.assert_close(reduced(optimizer, [unscaled], [weight])[0], case["result"]["gradient"])


def inner_of(case):
    inner = case["inner"]
    if inner.get("momentum"):
        return TF1Momentum(inner["learning_rate"], inner["momentum"])
    return keras.optimizers.SGD(inner["learning_rate"])


@pytest.mark.parametrize("id", STEPS)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_golden_steps(id, monkeypatch):
    case = STEPS[id]
    num_shards = case["num_shards"]
    clip = case.get("clip_by_global_norm_between_compute_and_apply")
    if clip is not None and case["reduction"] == "weighted_mean":
        clip *= num_shards  # there it clipped what was scaled already; here it is in units of the mean loss
    world = FakeWorld(num_shards).hold(monkeypatch)
    start = np.array([[1.0, -2.0], [0.5, 3.0]], "float32")
    variables = [[keras.Variable(start, name="v"), keras.Variable([1.0], name="u")] for _ in range(num_shards)]
    optimizers = [
        ks.CrossShard(inner_of(case), case["reduction"], groups_of(case), replica_clipnorm=clip)
        for _ in range(num_shards)
    ]
    for optimizer, mine in zip(optimizers, variables):
        optimizer.build(mine)
    for local, expected in zip(
        case["local_gradients_per_step_and_shard"], case["result"]["v_of_each_shard_after_each_step"], strict=True
    ):

        def step(replicas, local=local):
            r = replicas.replica_id
            optimizers[r].apply([golden.tensor(local[r]), None], variables[r])

        world.run(step)
        for (v, u), value in zip(variables, expected, strict=True):
            golden.assert_close(v, value)
            golden.assert_close(u, [1.0])
    for r, optimizer in enumerate(optimizers):
        assert optimizer.get_slot_names() == case["result"]["slot_names"]
        if case["result"]["slots_at_the_end"]:
            slot = optimizer.get_slot(variables[r][0], "momentum")
            golden.assert_close(slot, case["result"]["slots_at_the_end"][r])


@pytest.mark.backends("tensorflow")
def test_golden_indexed_slices(monkeypatch):
    """The same step with gradients that list rows."""
    import tensorflow as tf

    case = STEPS["weighted_mean/indexed_slices"]
    world = FakeWorld(2).hold(monkeypatch)
    start = np.array([[1.0, -2.0], [0.5, 3.0]], "float32")
    variables = [keras.Variable(start) for _ in range(2)]
    optimizers = [ks.CrossShard(inner_of(case)) for _ in range(2)]
    for optimizer, variable in zip(optimizers, variables):
        optimizer.build([variable])
    (local,) = case["local_gradients_per_step_and_shard"]

    def step(replicas):
        r = replicas.replica_id
        optimizers[r].apply([tf.IndexedSlices(tf.constant(local[r]), tf.constant([0, 1]), (2, 2))], [variables[r]])

    world.run(step)
    for variable, expected in zip(variables, case["result"]["v_of_each_shard_after_each_step"][0]):
        golden.assert_close(variable, expected)


def test_golden_errors_of_apply():
    assert APPLY["apply_all_none"]["error"] == APPLY["apply_with_ragged_groups"]["error"] == {"type": "ValueError"}
    with pytest.raises(ValueError, match="No gradients provided"):
        ks.CrossShard("sgd").apply([None], [keras.Variable([1.0])])
    with pytest.raises(ValueError, match="equal size"):
        ks.CrossShard("sgd", group_assignment=[[0, 1], [2]])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_dropped_reduction_turns_the_goldens_red(monkeypatch):
    plant(monkeypatch, lambda grads, *_: grads)
    with pytest.raises(AssertionError):
        test_golden_steps("weighted_mean/momentum/shards4/[[0, 1], [2, 3]]", monkeypatch)
