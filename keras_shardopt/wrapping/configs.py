"""Configs of Keras objects (nested JSON), changed so that other programs can load them.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.torch.optimizers` - the module named in files that Keras' torch optimizers write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TORCH_MODULE = "keras.src.backend.torch.optimizers."


def replaced(config: Any, replace: Callable[[dict[str, Any]], Any]) -> Any:
    """Return nested JSON with each dict replaced by `replace(dict)`, repeatedly until `replace` changes nothing."""
    if isinstance(config, list):
        return [replaced(each, replace) for each in config]
    if not isinstance(config, dict):
        return config
    if (other := replace(config)) is not config:
        return replaced(other, replace)
    return {key: replaced(value, replace) for key, value in config.items()}


def portable(config: Any) -> Any:
    """Replace torch's private optimizer classes in a config by public names, which every backend can load."""
    return replaced(config, _with_public_names)


def _with_public_names(config: dict[str, Any]) -> dict[str, Any]:
    if not str(config.get("module", "")).startswith(_TORCH_MODULE):
        return config
    return {**config, "module": "keras.optimizers", "registered_name": None}
