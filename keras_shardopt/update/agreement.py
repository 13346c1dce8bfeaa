"""Check that all processes train the same model with the same optimizer and versions.

Each process describes its training as text: versions, variables, optimizers and their arguments. If a compiled model
with these variables exists, the text includes its layers and losses. The processes compare digests of the text, and
exchange the text itself only if digests differ, so that each process can name the difference in its error.

Private names of Keras touched here (a test checks that each exists):
    `Trainer._compile_loss`, `CompileLoss._user_loss_weights` - the `loss_weights` of `compile`.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_shardopt.arguments import listed
from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.models import layers_of, models_with, optimizers_of
from keras_shardopt.numerics import Optimizer, Variable
from keras_shardopt.wrapping.chain import chain_of, children
from keras_shardopt.wrapping.slots import without_counters

Description = dict[str, str]


def described(optimizer: Optimizer, variables: Sequence[Variable]) -> Description:
    """Return a description of the training: names and values, both as text.

    It omits legitimate differences: names of optimizers, counters in automatic layer names (only their order matters),
    seeds, and initializers (all processes start with the same weights).
    """
    names = without_counters([_path(variable) for variable in variables])
    package = sys.modules["keras_shardopt"]  # an import would be circular
    found = {"Keras": keras.__version__, "keras_shardopt": package.__version__, **processes.versions()}
    found["number of trainable variables"] = str(len(variables))
    for i, (variable, name) in enumerate(zip(variables, names)):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        found[f"{_VARIABLE}{i}"] = f"`{name}` of shape {tuple(variable.shape)} in {dtype}"
    paths = dict(zip(map(_path, variables), names))
    # Leave a traced step, because the learning rate is a variable and its value must be read now.
    with runtime.init_scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of functions in configs, but these configs are never loaded
        _describe(optimizer, found, paths)
        for setting in ("dtype_policy", "floatx", "image_data_format", "epsilon"):
            value = getattr(keras.config, setting)()
            found[f"`keras.config.{setting}()`"] = repr(getattr(value, "name", value))
        _describe_model(optimizer, variables, found)
    return found


_VARIABLE = "trainable variable "
_LAYER = "layer "
_OF_LAYER = " of layer "
_LOSS = ("`loss`", "`loss_weights`")


def check_agreement(mine: Description, optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Compare the descriptions of training of all processes. All processes must call this together.

    Args:
        mine: this process's description, which `described` returned.
        optimizer: the optimizer passed to `described`.
        variables: the variables passed to `described`.

    Raises:
        ValueError: on every process, if descriptions differ. The error names the difference.
    """
    if _is_same_on_all(mine):
        return
    # A deleted model that only some processes still hold also makes the texts differ. So collect garbage, and repeat.
    gc.collect()
    mine = {entry: value for entry, value in mine.items() if not _is_of_model(entry)}
    _describe_model(optimizer, variables, mine)
    if _is_same_on_all(mine):
        return
    all_descriptions = processes.gather_objects(mine)
    entries = list(dict.fromkeys(entry for theirs in all_descriptions for entry in theirs))
    differing = [entry for entry in entries if len({theirs.get(entry) for theirs in all_descriptions}) > 1]
    if not differing:
        differing, all_descriptions = ["order"], [{"order": repr(list(theirs))} for theirs in all_descriptions]
    # One missing or moved variable makes all later ones differ too, so name only the first. Do the same for layers.
    variables = [entry for entry in differing if entry.startswith(_VARIABLE)]
    layers = [entry for entry in differing if entry.startswith(_LAYER)]
    named = [entry for entry in differing if entry not in (*variables[1:], *layers[1:])]
    if layers:
        named = [entry for entry in named if _OF_LAYER not in entry]
    received = [
        f"{entry}: {_by_process([theirs.get(entry, 'none') for theirs in all_descriptions])}" for entry in named
    ]
    raise ValueError(
        "All processes must train the same model with the same optimizer and the same versions. No update has been "
        f"made yet. Received {listed(received)}. "
        "Run the same script, with the same arguments and the same installation, in every process."
    )


def _is_same_on_all(mine: Description) -> bool:
    digest = hashlib.sha256(repr(list(mine.items())).encode()).hexdigest()
    return len(set(processes.gather_objects(digest))) == 1


def _is_of_model(entry: str) -> bool:
    """Whether an entry of a description is about the model: its losses and layers."""
    return entry in _LOSS or entry.startswith(_LAYER) or _OF_LAYER in entry


_MAX_PROCESSES_NAMED = 8


def _by_process(values: Sequence[str]) -> str:
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(value, []).append(process)
    return ", ".join(f"{value} on {_processes(ids)}" for value, ids in processes.items())


def _processes(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"process {ids[0]}"
    shown = [str(i) for i in ids[:_MAX_PROCESSES_NAMED]]
    last = shown.pop() if len(ids) <= _MAX_PROCESSES_NAMED else f"{len(ids) - _MAX_PROCESSES_NAMED} others"
    return f"processes {', '.join(shown)} and {last}"


# -- values as text ------------------------------------------------------------------------------------------------


def _describe(optimizer: Optimizer, found: Description, paths: dict[str, str]) -> None:
    """Add the class and arguments of an optimizer, and of the optimizers inside it, to `found`."""
    number = sum(entry.startswith("class of optimizer ") for entry in found)
    kind = type(optimizer)
    found[f"class of optimizer {number}"] = f"{kind.__module__}.{kind.__qualname__}"
    where = f"optimizer {number} ({kind.__name__})"
    try:
        config = optimizer.get_config()
    except Exception as error:  # the user's `get_config` may fail, but this check must not
        config = {"config": type(error).__name__}
    for argument, value in config.items():
        if argument not in ("name", "inner_optimizer", "optimizers"):
            found[f"`{argument}` of {where}"] = _as_text(value, paths)
    for part in children(optimizer):
        _describe(part, found, paths)


def _describe_model(optimizer: Optimizer, variables: Sequence[Variable], found: Description) -> None:
    """Add the layers and losses of the model compiled with this optimizer to `found`, if such a model exists."""
    # Ignore other models with these variables, because perhaps only one process has created them.
    compiled = _compiled_with(optimizer, models_with(variables))
    if compiled is not None:
        found[_LOSS[0]] = _short(_loss_as_text(getattr(compiled, "loss", None)))
        weights = getattr(getattr(compiled, "_compile_loss", None), "_user_loss_weights", None)
        found[_LOSS[1]] = _short(_as_text(weights, {}))
    # Skip nested models, because the list also contains their layers.
    layers = [] if compiled is None else [layer for layer in layers_of(compiled) if not isinstance(layer, keras.Model)]
    for i, (layer, name) in enumerate(zip(layers, without_counters([layer.name for layer in layers]))):
        kind = type(layer)
        found[f"{_LAYER}{i}"] = f"`{name}` of {kind.__module__}.{kind.__qualname__}"
        for argument, value in _config_of(layer).items():
            found[f"`{argument}`{_OF_LAYER}{i}, `{name}`"] = _short(_as_text(value, {}))


def sum_losses_of(optimizer: Optimizer, variables: Sequence[Variable]) -> list[Any]:
    """Return the losses with `reduction="sum"` of the model compiled with this optimizer."""
    model = _compiled_with(optimizer, models_with(variables))
    losses = keras.tree.flatten(getattr(model, "loss", None))
    return [loss for loss in losses if getattr(loss, "reduction", None) == "sum"]


def _compiled_with(optimizer: Optimizer, models: Sequence[Any]) -> Any:
    """Return the last (smallest) of `models` that uses this optimizer, alone or inside another; None without one."""
    for model in reversed(models):
        if any(optimizer is part for held in optimizers_of(model) for part in chain_of(held)):
            return model
    return None


def _loss_as_text(loss: Any) -> str:
    if isinstance(loss, dict):
        return f"{{{', '.join(f'{key!r}: {_loss_as_text(value)}' for key, value in loss.items())}}}"
    if isinstance(loss, (list, tuple)):
        return f"[{', '.join(map(_loss_as_text, loss))}]"
    if isinstance(loss, keras.losses.Loss):
        return f"{type(loss).__name__}({_as_text(_config_of(loss), {})})"
    return _as_text(loss, {})


def _config_of(layer_or_loss: Any) -> dict[str, Any]:
    """Return the arguments of a layer or loss, without those that may differ between processes."""
    if isinstance(layer_or_loss, keras.layers.TorchModuleWrapper):
        return {"module": repr(layer_or_loss.module)}  # its config would contain all weights and their devices
    try:
        config = layer_or_loss.get_config()
    except Exception as error:  # the user's `get_config` may fail, but this check must not
        return {"get_config": type(error).__name__}
    return _comparable(config) if isinstance(config, dict) else {}


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        if "DTypePolicy" in str(value.get("class_name")):
            return value  # keep the entry `name`, which is the dtype policy here
        return {key: _comparable(item) for key, item in value.items() if not _may_differ(key)}
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return value


def _may_differ(key: Any) -> bool:
    return key in ("name", "seed", "build_config") or (isinstance(key, str) and key.endswith("initializer"))


def _short(text: str) -> str:
    """Shorten a text for an error message; different texts stay different."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


_MAX_CHARACTERS = 120


def _as_text(value: Any, paths: dict[str, str]) -> str:
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            return "a lambda"  # omit its config, because this contains a file name that may differ between processes
        if isinstance(value.get("class_name"), str) and "config" in value:
            return f"{value['class_name']}({_as_text(value['config'], paths)})"
        # Sorted, because a dict built from a set has a different order on each process.
        items = sorted(f"{_as_text(key, paths)}: {_as_text(item, paths)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_as_text(item, paths) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_as_text(item, paths) for item in value))}}}"
    if isinstance(value, keras.Variable):
        return repr(paths.get(value.path, value.path))
    if isinstance(value, str):
        return repr(paths.get(value, re.sub(r" at 0x[0-9a-fA-F]+", "", value)))
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"an array of shape {value.shape} in {value.dtype} ({digest[:8]})"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float, type(None))):
        return repr(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text or "object>" in text else text


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", ""))
