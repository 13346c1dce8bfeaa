"""JAX: errors of exchanges with a process that has ended."""

import jax
import pytest

pytestmark = pytest.mark.backends("jax")

LOST = [
    "UNKNOWN: Gloo AllGather failed: [gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:7094: Connection reset",
    "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited",
    "UNAVAILABLE: Task 1 heartbeat timeout.\nMore lines.",
    "DEADLINE_EXCEEDED: Barrier timed out.",
]
OTHERS = ["RESOURCE_EXHAUSTED: Out of memory in NCCL", "INTERNAL: ptxas exited", "a lost connection of the user's", ""]


def failing(num_processes, kind, message, monkeypatch):
    from keras_shardopt.backends.jax import processes

    monkeypatch.setattr(processes.processes, "process", lambda: (num_processes, 1))
    with processes.naming_lost_processes():
        raise kind(message)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize("message", LOST)
def test_a_lost_connection_names_the_others_and_the_remedy(message, kind, monkeypatch):
    for num_processes, others in ((2, "process 0"), (4, "processes 0, 2, 3")):
        with pytest.raises(RuntimeError) as failure:
            failing(num_processes, kind, message, monkeypatch)
        assert type(failure.value) is RuntimeError and str(failure.value.__cause__) == message
        assert f"a failed exchange of process 1 with {others}. Read the output" in str(failure.value)
        assert "BackupAndRestore" in str(failure.value) and str(failure.value).endswith(message.splitlines()[0])
    with pytest.raises(kind) as failure:  # one process exchanges nothing
        failing(1, kind, message, monkeypatch)
    assert type(failure.value) is kind


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize("message", OTHERS)
def test_other_errors_stay_what_they_are(message, kind, monkeypatch):
    with pytest.raises(kind) as failure:
        failing(2, kind, message, monkeypatch)
    assert type(failure.value) is kind and str(failure.value) == message
