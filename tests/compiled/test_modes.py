"""Steps as the compilers for TPU v5e and H100 make them: collectives, bytes, donated state, temporary memory."""

import importlib.util

import keras
import pytest
from compiled import modes

MISSING = [name for name in ("libtpu", "jax_plugins") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.backends("jax"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs libtpu and JAX's CUDA plugin; missing: {', '.join(MISSING)}"),
]

# By mode: the bytes of each kind of collective, in those of the weights; "!" stands for inside a branch only.
SENT = {
    "plain": {"all-reduce": 1},
    "shard_state": {"reduce-scatter": 1, "all-gather": 1},
    "shard_state, replica_transform": {"reduce-scatter": 1, "all-gather": 1},
    "accumulation": {"all-reduce!": 1},
    "accumulation, shard_state": {"reduce-scatter!": 1, "all-gather": 1},
    "on_nonfinite": {"all-reduce": 1},
    "on_nonfinite, shard_state": {"reduce-scatter": 1, "all-gather": 1},
    "bfloat16": {"all-reduce": 0.5},
    "Int8": {"all-to-all": 0.25, "all-gather": 0.25},
    "MixedPrecision": {"all-reduce": 1},
    "LossScaling": {"all-reduce": 1},
    "GradientClipping": {"all-reduce": 1},
    "BatchNormalization": {"all-reduce": 1},
    "sync_every": {"all-reduce!": 1},
    "virtual_replicas": {"all-to-all": 1, "all-gather": 1},
    "embedding": {"all-reduce": 1},
    "transformer": {"all-reduce": 1},
}
# Temporary memory beyond that of plain Keras, in bytes of the weights, where there is any (docs/compiled.md).
TEMPORARY = {
    ("GradientClipping", "tpu:v5e:2x4"): 1.0,
    ("virtual_replicas", "tpu:v5e:2x4"): 1.8,
    ("accumulation", "h100:8"): 2.3,
    ("BatchNormalization", "h100:8"): 0.15,
    ("sync_every", "h100:8"): 3.1,
    ("virtual_replicas", "h100:8"): 1.3,
}
DEFAULT = ("plain", "shard_state, replica_transform", "accumulation", "on_nonfinite")
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")


def check(mode, target, made):
    """Fails unless the step sends, keeps and needs as much as it should."""
    for kind in KINDS:
        anywhere, inside = SENT[mode].get(kind), SENT[mode].get(f"{kind}!")
        found = modes.total(made, kind)
        assert found == pytest.approx((anywhere or inside or 0) * made.weights, abs=0.0101 * made.weights), kind
        if inside:
            assert modes.total(made, kind, in_branch=False) < 0.001 * made.weights, f"{kind} in each micro-batch"
    assert made.output - made.aliased < 4096, "state that is not donated"
    stock = f"Keras, {mode}" if f"Keras, {mode}" in modes.MODES else "Keras"
    limit = modes.compiled(stock, target).temporary + TEMPORARY.get((mode, target), 0) * made.weights
    assert made.temporary <= limit + 0.01 * made.weights, "temporary memory"


@pytest.mark.parametrize("target", modes.TARGETS)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in DEFAULT else [pytest.mark.exhaustive]) for mode in SENT]
)
def test_a_step_sends_keeps_and_needs_what_it_should(mode, target):
    check(mode, target, modes.compiled(mode, target))


def test_every_mode_has_its_formula():
    assert {mode for mode in modes.MODES if not mode.startswith("Keras")} == set(SENT)


# -- faults ----------------------------------------------------------------------------------------------------------


def compiled_with_a_fault(mode, target):
    return modes.compiled.__wrapped__(mode, target)


def test_one_more_all_reduce_is_found(monkeypatch):
    from keras_shardopt.backends.jax.communicator import MappedAxis

    real = MappedAxis.all_reduce

    def twice(self, tensors, op):
        more = real(self, [keras.ops.exp(tensor) for tensor in tensors], op)
        return [first + 0 * second for first, second in zip(real(self, tensors, op), more)]

    monkeypatch.setattr(MappedAxis, "all_reduce", twice)
    made = compiled_with_a_fault("bfloat16", "tpu:v5e:2x4")
    with pytest.raises(AssertionError, match="all-reduce"):
        check("bfloat16", "tpu:v5e:2x4", made)


def test_a_lost_donation_is_found(monkeypatch):
    from keras_shardopt.fit.jax.jitted import making_steps
    from keras_shardopt.fit.jax.step import TrainStep

    def keeping(step):
        return making_steps(lambda jit: lambda function, donate_argnums, **options: jit(function, **options))

    monkeypatch.setattr(TrainStep, "compiler_options", keeping)
    made = compiled_with_a_fault("plain", "tpu:v5e:2x4")
    with pytest.raises(AssertionError, match="not donated"):
        check("plain", "tpu:v5e:2x4", made)


def test_gradients_sent_in_float32_are_found(monkeypatch):
    from keras_shardopt.backends.compression import Compressed

    monkeypatch.setattr(Compressed, "all_reduce", lambda self, tensors, op: self._replicas.all_reduce(tensors, op))
    made = compiled_with_a_fault("bfloat16", "tpu:v5e:2x4")
    with pytest.raises(AssertionError, match="all-reduce"):
        check("bfloat16", "tpu:v5e:2x4", made)
