"""Model files without the classes of this package, which plain Keras loads on any backend."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from typing import Any

from keras_shardopt.wrapping.configs import replaced

_OURS = "keras_shardopt"


def make_portable(path: str) -> None:
    """Rewrite a ".keras" file: remove the wrappers around the optimizer, and set `synchronized=False` in layers.

    Raises:
        ValueError: if the model has other classes of this package.
    """
    part = f"{path}.part"
    try:
        with zipfile.ZipFile(path) as before, zipfile.ZipFile(part, "w") as after:
            for entry in before.infolist():
                if entry.filename == "config.json":
                    after.writestr(entry, json.dumps(replaced(json.loads(before.read(entry)), _portable)))
                else:
                    with before.open(entry) as source, after.open(entry, "w") as target:
                        shutil.copyfileobj(source, target, 2**24)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def _portable(config: dict[str, Any]) -> Any:
    name, options = config.get("class_name"), config.get("config")
    if str(config.get("registered_name")).startswith(_OURS) or str(config.get("module")).startswith(_OURS):
        if isinstance(options, dict) and "inner_optimizer" in options:
            return options["inner_optimizer"]
        raise ValueError(
            "With `portable=True`, the model and the optimizer inside all wrappers must be made of Keras' classes. "
            f"Received: {name!r} of keras_shardopt. Use a class of Keras in its place, or `portable=False`."
        )
    if name == "BatchNormalization" and isinstance(options, dict) and options.get("synchronized"):
        return {**config, "config": {**options, "synchronized": False}}  # because True needs TensorFlow
    return config
