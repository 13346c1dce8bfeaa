"""Functions of Keras that this package replaces. `install` replaces them at their first use, not on import.

| use | first use |
|---|---|
| "optimizers" | the first wrapper, `data_parallel()`, `shard_data`, `synchronize_batch_normalization` |
| "reduction" | the first `CrossShard` |
| "prepare" | the first call of `prepare` |
| "batches" | the first call of `prepare`, or `data_parallel()` with several replicas |
| "losses" | the first loss that is divided by the rows of all replicas |
| "skips" | the first optimizer that can skip updates |
| "randomness" | the first optimizer that is built for several replicas |

Tables have the form `{use: {target: (replacement, reason)}}`. A replacement "module:name" names a function of the
package that replaces the target. "module:name()" names a function that gets the target and returns its replacement.
Each reason ends with the change in Keras that would make the row unnecessary.

Each framework has another table, in `backends/<framework>/patches.py`. `data_parallel()` also replaces
`Trainer.__init__`, `Trainer.compile` and, on PyTorch, `Orthogonal.__call__` until its block ends. Two more changes are
elsewhere: `Variable._direct_assign` (`jax/placement.py`) and, from Keras 3.16 on, `Model._initialize_ddp`
(`torch/ddp.py`).
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.models import Trainer

Table = Mapping[str, Mapping[str, tuple[str, str]]]

_TRAIN_APART = "keeps PyTorch ranks from training separate models, until Keras trains one model on all ranks"
_SYNCHRONIZED = "adds `synchronized=True`, until Keras has this option on all backends and for uneven batches"
_SAVES = ("fit.callbacks:saving_complete_files()", "saves complete files, until Keras calls the model's save methods")

PATCHES: Table = {
    "optimizers": {
        f"{Trainer.__module__}.{Trainer.__name__}.__init__": (
            "backends.models:noting_models()",
            "finds the models of a variable, until Keras passes the models to `Optimizer.build`",
        ),
        f"{Trainer.__module__}.{Trainer.__name__}.compile": (
            "backends.models:noting_compiled()",
            "also finds models made before `gc.freeze()`, until Keras passes the models to `Optimizer.build`",
        ),
        "keras.Model.fit": ("fit.compiled:watching_fit()", _TRAIN_APART),
        "keras.Model.train_on_batch": ("fit.compiled:watching_train_on_batch()", _TRAIN_APART),
        "keras.layers.BatchNormalization.__init__": ("fit.batch_normalization:taking_synchronized()", _SYNCHRONIZED),
        "keras.layers.BatchNormalization._moments": ("fit.batch_normalization:_moments", _SYNCHRONIZED),
    },
    "prepare": {
        "keras.saving.save_model": _SAVES,
        "keras.saving.save_weights": _SAVES,
        "keras.models.save_model": _SAVES,
        "keras.callbacks.CallbackList.set_model": (
            "fit.callbacks:setting_model()",
            "makes only one process write files, until Keras' callbacks support several processes",
        ),
    },
    "losses": {
        "keras.src.losses.loss.reduce_weighted_values": (
            "update.losses:_reduce_weighted_values",
            "divides losses by the rows of all replicas, until Keras' `Loss` has an argument for the divisor",
        ),
        "keras.metrics.Mean.update_state": (
            "update.losses:converting_values()",
            "logs the loss of the whole batch, until Keras passes the trainer's divisor to its metrics",
        ),
    },
    "skips": {
        "keras.Variable.assign": (
            "wrapping.rollback:_assign",
            "restores moving statistics after a skipped update, until Keras' layers return them and do not assign them",
        ),
    },
}

_TABLES = {name: f"keras_shardopt.backends.{name}.patches" for name in ("tensorflow", "jax", "torch")}
_installed: set[str] = set()
_lock = threading.RLock()


def install(use: str) -> None:
    """Replace the functions that the tables list under `use`, if this Keras version has them."""
    if use in _installed:
        return
    with _lock:
        if use in _installed:  # another thread was faster
            return
        found = list(_found(use))
        for owner, name, new in found:
            setattr(owner, name, new)
        for scan in {new.scan for _, _, new in found if hasattr(new, "scan")}:  # a set, so each is called once
            scan()
        _installed.add(use)


def _found(use: str) -> Iterator[tuple[Any, str, Any]]:
    for table in (PATCHES, getattr(for_backend(_TABLES), "PATCHES", {})):
        for target, (stand_in, _) in table.get(use, {}).items():
            path, _, name = target.rpartition(".")
            try:
                owner = pkgutil.resolve_name(path)
                old = getattr(owner, name)
            except (ImportError, AttributeError):
                continue
            new = pkgutil.resolve_name(f"keras_shardopt.{stand_in.removesuffix('()')}")
            yield owner, name, new(old) if stand_in.endswith("()") else new
