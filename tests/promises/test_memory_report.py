"""`memory_report().kinds`: the predicted bytes of a replica are those of the arrays that it holds."""

import keras
import pytest
from promises.problems import memory
from support.suites import some

import keras_shardopt as ks

NUM_REPLICAS = 2
WEIGHTS = 4 * memory.NUM_WEIGHTS
ON_TORCH = keras.config.backend() == "torch"


def close(number):
    """Padding, counters and flags take less than 600 bytes here."""
    return pytest.approx(number, abs=600)


@pytest.mark.parametrize(
    "case", some(memory.CASES, lambda case: case != "plain" if ON_TORCH else case == "shard_state")
)
def test_predicted_bytes_are_those_of_the_arrays(world, case):
    found = world.run(
        memory.reported, NUM_REPLICAS, case, [each for each in memory.CASES if (each == "plain") == (case == "plain")]
    )
    kinds, is_divided = found["batch"], case != "plain"
    share = WEIGHTS / NUM_REPLICAS if is_divided else WEIGHTS
    statistics = 4 * memory.NUM_STATISTICS
    assert kinds["weights"].predicted == (close(share + statistics) if "weights" in case else WEIGHTS + statistics)
    assert kinds["state"].predicted == close(share)
    for kind in ("weights", "state", "buffers"):
        assert kinds[kind].measured == close(kinds[kind].predicted), kind
    sums = {"accumulation": WEIGHTS}.get(case, 0)
    if ON_TORCH:
        # The buckets: all gradients; or, of slices, two being filled and sent, and one being received.
        assert kinds["buffers"].predicted == close((2 if is_divided else 1) * WEIGHTS)
        assert kinds["gradients"].predicted == close(share + sums)
        # Without `shard_state`, gradients lie in the buckets.
        assert kinds["gradients"].measured == close(share + sums if is_divided else 0)
    else:
        assert kinds["gradients"].predicted == close(WEIGHTS + sums)
        assert kinds["gradients"].measured is None
        # TensorFlow keeps slices of weights.
        slices = share if is_divided and keras.config.backend() == "tensorflow" else 0
        assert kinds["buffers"].predicted == close(slices)
    copies = found["save"]["host copies"]
    num_processes = NUM_REPLICAS if ON_TORCH else 1
    assert copies.predicted == close((WEIGHTS + 4 * memory.NUM_STATISTICS + WEIGHTS) / num_processes)
    # Process 0 alone saves moving statistics on several processes.
    assert copies.measured == pytest.approx(copies.predicted, abs=600 + 4 * memory.NUM_STATISTICS)
    assert found["after"]["host copies"].measured == 0


def test_the_report_is_printed_by_kind(world):
    found = world.run(memory.printed, NUM_REPLICAS, "")
    assert "bytes on this replica:       predicted        measured" in found
    rows = {line.split("  ")[1]: line.split()[-2:] for line in found.splitlines() if line.startswith("  ")}
    assert rows["weights"] == ["408", "408"]
    assert rows["gradients"] == ["408", "0" if ON_TORCH else "unknown"]


def test_one_replica_needs_no_buffers():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.optimizer.build(model.trainable_variables)
    kinds = model.optimizer.memory_report().kinds
    assert [kinds[kind].predicted for kind in ("weights", "gradients", "buffers")] == [72, 72, 0]
