"""The file of a `BackupAndRestore`: a header in JSON, and arrays, in the format of `numpy.savez`.

The name of an array is a kind and a number, such as "variable0".
"""

from __future__ import annotations

import collections
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_shardopt.checkpoint.atomic_file import Unfinished


def write(
    path: str,
    header: Mapping[str, Any],
    arrays: Mapping[str, Iterable[np.ndarray]],
    parts: Sequence[tuple[Any, str]],
    keep_as: str | None,
) -> None:
    """Write a backup atomically.

    Args:
        path: the file. Its folder is created if missing.
        header: JSON-serializable facts.
        arrays: the arrays of each kind.
        parts: objects that save arrays with Keras' `save_own_variables`, each with the kind of its arrays.
        keep_as: a path to rename the previous backup to; None to replace it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    unfinished = Unfinished(path)
    try:
        with zipfile.ZipFile(unfinished.path, "w") as archive:
            _Entries(archive)["header"] = np.frombuffer(json.dumps(header).encode(), "uint8")
            for kind, values in arrays.items():
                entries = _Entries(archive, kind)
                for i, array in enumerate(values):
                    entries[str(i)] = array
            for part, kind in parts:
                part.save_own_variables(_Entries(archive, kind))
        unfinished.finish(keep_as)
    finally:
        unfinished.discard()


def read_newest(*paths: str) -> tuple[Any, dict[str, list[np.ndarray]] | None]:
    """Return the header and the arrays by kind of the first readable backup; (None, None) if none exists.

    The header then also has the "path" of the backup and the "kinds" of its arrays.

    Raises:
        OSError: if backups exist, but none can be read.
    """
    problem: Exception | None = None
    for path in paths:
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                header = json.loads(stored["header"].tobytes())
                kinds = collections.Counter(name.rstrip("0123456789") for name in stored.files if name != "header")
                arrays = {kind: [stored[f"{kind}{i}"] for i in range(num)] for kind, num in kinds.items()}
                return {**header, "path": path, "kinds": sorted(kinds)}, {"variable": [], **arrays}
        except FileNotFoundError:
            continue
        except Exception as error:  # damaged archives raise many kinds of errors
            words = str(error) or type(error).__name__
            problem = problem or OSError(f"The backup {path!r} cannot be read: {words}")
    if problem is not None:
        raise problem
    return None, None


class _Entries:
    """A store that writes arrays to an archive, under names that begin with their kind."""

    def __init__(self, archive: zipfile.ZipFile, kind: str = "") -> None:
        self._archive = archive
        self._kind = kind

    def __setitem__(self, key: str, array: Any) -> None:
        with self._archive.open(f"{self._kind}{key}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, _storable(np.asanyarray(array)), allow_pickle=False)


def _storable(array: np.ndarray) -> np.ndarray:
    # NumPy's file format has no bfloat16 and float8, but float32 represents their values exactly.
    return array if array.dtype.kind in "biufc" else array.astype("float32")
