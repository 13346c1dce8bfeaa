"""Converts a sharded checkpoint to one Keras file. This needs neither the model nor several processes."""

from __future__ import annotations

import datetime
import json
import math
import os
import tempfile
import zipfile
from typing import Any

import h5py
import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt.checkpoint.atomic_file import Unfinished
from keras_shardopt.checkpoint.saving import file_path
from keras_shardopt.checkpoint.sharded.pieces import PIECE_BYTES, Checkpoint, StoredArray
from keras_shardopt.checkpoint.sharded.saves import newest
from keras_shardopt.checkpoint.sharded.state import ASSETS
from keras_shardopt.wrapping.configs import replaced

_SUFFIXES = (".keras", ".weights.h5")


def consolidate(path: str | os.PathLike[str], filepath: str | os.PathLike[str]) -> None:
    """Convert a sharded checkpoint to one Keras file, with the optimizer that is inside `CrossShard`.

    The file holds weights and optimizer state in the format of plain Keras. It does not contain `CrossShard`, so
    `keras.saving.load_model` reads it without this package, unless it has other classes of the package. Random number
    states and per-replica values are dropped. The conversion needs memory for 16 MiB of an array, or for one row if a
    row is larger.

    `python -m keras_shardopt.checkpoint consolidate PATH FILE` does the same.

    Args:
        path: str or path: a checkpoint, or a directory, whose newest complete checkpoint is used.
        filepath: str or path, ending in ".keras", or in ".weights.h5" for a file without the architecture. It is
            replaced in one step.

    Raises:
        TypeError: if an argument is not a path.
        ValueError: if a path is not local, `filepath` has another ending, or Keras could not serialize the model
            (".keras" only).
        FileNotFoundError: if no complete checkpoint exists.
        OSError: if the checkpoint is damaged, or the file cannot be written.

    Example:
        >>> import keras, numpy as np, os, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("adam"), "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        >>> directory = tempfile.mkdtemp()
        >>> path = ks.save_sharded(model, directory)
        >>> ks.consolidate(directory, os.path.join(directory, "model.keras"))
        >>> type(keras.saving.load_model(os.path.join(directory, "model.keras")).optimizer).__name__
        'Adam'
    """
    target = file_path(filepath, _SUFFIXES)
    checkpoint = newest(check.local_path("path", path))
    config = checkpoint.manifest["config"]
    if target.endswith(".keras") and config is None:
        raise ValueError(
            f"Keras could not serialize the model of {checkpoint.folder!r}. Write a '.weights.h5' file instead, and "
            "load this file into a model. A model with `get_config` can be serialized."
        )
    unfinished = Unfinished(target)
    try:
        if target.endswith(".keras"):
            with tempfile.TemporaryDirectory(dir=os.path.dirname(unfinished.path)) as folder:
                weights = os.path.join(folder, "model.weights.h5")
                _write_weights(checkpoint, weights)
                with zipfile.ZipFile(unfinished.path, "w") as archive:
                    archive.writestr("metadata.json", json.dumps(_metadata(checkpoint)))
                    archive.writestr("config.json", json.dumps(replaced(config, _plain)))
                    archive.write(weights, "model.weights.h5")
                    for name in filter(lambda name: name.startswith(ASSETS), checkpoint):
                        archive.writestr(f"assets/{name[len(ASSETS) :]}", np.asarray(checkpoint[name]).tobytes())
        else:
            _write_weights(checkpoint, unfinished.path)
        unfinished.finish()
    except RuntimeError as error:  # h5py raises it if the disk is full
        raise OSError(f"The file {target!r} cannot be written: {error}") from error
    finally:
        unfinished.discard()


def _write_weights(checkpoint: Checkpoint, path: str) -> None:
    with h5py.File(path, "w") as file:
        for name in checkpoint:
            if not name.startswith("training/"):
                _write_array(file, checkpoint[name])


def _write_array(file: h5py.File, array: StoredArray) -> None:
    dataset = file.create_dataset(array.path, array.shape, array.dtype)
    if array.dtype.name == "bfloat16":
        dataset.attrs["dtype"] = "bfloat16"  # Keras marks bfloat16 in the same way
    for name, note in array.notes.items():
        dataset.attrs[name] = note
    if not array.shape or not array.size:
        dataset[()] = np.asarray(array)
        return
    rows = max(1, PIECE_BYTES // (math.prod(array.shape[1:]) * array.dtype.itemsize))
    for first in range(0, array.shape[0], rows):
        dataset[first : first + rows] = array[first : first + rows]


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    now = datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S")
    return {"keras_version": checkpoint.manifest["keras"], "date_saved": now}


def _plain(config: dict[str, Any]) -> Any:
    """Return the config of the inner optimizer if `config` is that of a `CrossShard`; otherwise return `config`."""
    if config.get("class_name") == "CrossShard" and str(config.get("registered_name")).startswith("keras_shardopt"):
        return config["config"]["inner_optimizer"]
    return config
