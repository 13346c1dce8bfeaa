"""The tutorials run as their texts say, on every backend, and show what they promise."""

import sys

import pytest
from support import launch
from test_examples import EXAMPLES, printed, run

pytestmark = pytest.mark.timeout(300)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
BACKENDS = ["jax", "tensorflow", "torch"]


def shown(name, backend, num_ranks, folder):
    """What the tutorial prints, which is run in an empty folder."""
    start = [*TORCHRUN, str(num_ranks)] if backend == "torch" else [sys.executable]
    command = " ".join(f"'{word}'" for word in [*start, str(EXAMPLES / "tutorials" / f"{name}.py")])
    output = run(
        *["sh", "-ec", f"cd '{folder}' && {command}"], KERAS_BACKEND=backend, XLA_FLAGS=launch.WITHOUT_FUSION_EMITTERS
    )
    assert printed(output, "backend") == backend
    assert int(printed(output, "replicas")) == num_ranks
    assert float(printed(output, "difference between replicas")) == 0
    return output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.exhaustive
def test_digits_on_four_replicas(backend, tmp_path):
    output = shown("digits", backend, 4, tmp_path)
    assert float(printed(output, "accuracy on held-out digits")) > 0.85
    # Adam divides by the size of a gradient, so that rounding grows to 1.2e-4 on TensorFlow; by SGD it is 5e-7.
    assert float(printed(output, "difference to one replica")) < 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_learn_with_half_of_the_state_on_each_replica(backend, tmp_path):
    output = shown("lora", backend, 2, tmp_path)
    before, after = (float(printed(output, f"on their side, {when}")) for when in ("before", "after"))
    assert before < 0.4 and after > 0.7
    assert float(printed(output, "share of the state held")) < 0.51
    trained, of, whole = output.partition("weights trained")[2].split()[:3]
    assert of == "of" and int(trained) < int(whole) / 3
    assert {file.name for file in tmp_path.iterdir()} == {"pretrained.keras", "lora.keras"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_generator_finds_the_ring(backend, tmp_path):
    output = shown("gan", backend, 2, tmp_path)
    before, after = (float(printed(output, f"distance to the ring, {when}")) for when in ("before", "after"))
    assert before > 0.4 and after < 0.25
