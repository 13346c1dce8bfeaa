"""Issues warnings that point at a line of the user's program, only on process 0 of a job."""

from __future__ import annotations

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.keras_callers import warn_user

# On JAX, avoid `jax.process_index` here: it would create the devices, perhaps before the user chooses them.
_before_devices = for_backend({"jax": "keras_shardopt.backends.jax.processes"})


def warn(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn on process 0 only, because all processes make the same calls."""
    if processes.process()[1] == 0 if _before_devices is None else _before_devices.is_first():
        runtime.no_compile(warn_user, words, category)
