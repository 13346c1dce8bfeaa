"""The current backend's `runtime`, `processes` and `placement`, chosen once: Keras fixes its backend on import."""

from __future__ import annotations

from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.placement import Placement
from keras_shardopt.backends.processes import Processes
from keras_shardopt.backends.runtime import Runtime

_FOLDERS = {name: f"keras_shardopt.backends.{name}" for name in ("tensorflow", "jax", "torch")}

_loaded: Any = for_backend(_FOLDERS)

runtime: Runtime = Runtime() if _loaded is None else _loaded.runtime.runtime
processes: Processes = Processes() if _loaded is None else _loaded.processes.processes
placement: Placement = Placement() if _loaded is None else _loaded.placement.placement
