"""The files of a sharded checkpoint: one `safetensors` file per process with pieces of arrays, and a manifest.

A checkpoint is a folder. Each process writes its pieces and a report (`rank-00000.json`). Process 0 merges the reports
into `manifest.json`, and writes it last, in one step: a folder without a manifest is not a checkpoint. A piece is
a box of an array (a range per dimension), or a range of the flattened array. A piece has at most `PIECE_BYTES` bytes,
and the manifest holds its hash, so readers check every byte that they use.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from keras_shardopt.backends.stored_parts import OwnParts, Part
from keras_shardopt.checkpoint.atomic_file import flush_folder

FORMAT = 1
"""The version of the manifest's format."""

MANIFEST = "manifest.json"

PIECE_BYTES = 2**24
"""The largest size of a piece. Readers need memory for one piece in addition to the result."""


class Source(NamedTuple):
    """An array of a checkpoint, and the parts of this array that one process saves."""

    own: OwnParts
    """The parts of the array that this process writes."""

    notes: dict[str, Any]
    """The attributes that the array would have in an HDF5 file of Keras."""


# -- writing ---------------------------------------------------------------------------------------------------------


def write_process(folder: str, index: int, sources: Mapping[str, Source], about: dict[str, Any]) -> None:
    """Write the pieces of one process, then its report: a list of the pieces, and the dict `about`.

    Raises:
        OSError: if the folder cannot be written to.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    name = f"rank-{index:05d}.safetensors"
    tensors: dict[str, np.ndarray] = {}
    entries = {}
    for path, source in sources.items():
        pieces = []
        for start, values in (piece for part in source.own.parts for piece in _split(part)):
            key = "@".join((path, ",".join(map(str, start))))
            tensors[key] = values = _storable(values)
            pieces.append([name, key, start, values.shape, _hash(values)])
        entries[path] = {
            "shape": source.own.shape,
            "dtype": source.own.dtype,
            "is_flat": source.own.is_flat,
            "notes": source.notes,
            "pieces": pieces,
        }
    path = os.path.join(folder, name)
    try:
        save_file(tensors, f"{path}.unfinished")
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(f"The file {path!r} cannot be written: {error}") from error
    _finish(path)
    report = {**about, "entries": entries, "bytes": os.path.getsize(path)}
    write_json(report_path(folder, index), report)


def write_manifest(folder: str, num_processes: int, about: dict[str, Any]) -> None:
    """Write the manifest: the merged reports of all processes, and the values in `about`.

    Raises:
        OSError: if a report cannot be read, or the manifest cannot be written.
        ValueError: if the pieces do not cover each array exactly once.
    """
    reports = [read_json(report_path(folder, index)) for index in range(num_processes)]
    entries: dict[str, dict[str, Any]] = {}
    for report in reports:
        for path, entry in report["entries"].items():
            whole = entries.setdefault(path, {**entry, "pieces": []})
            whole["shape"] = entry["shape"] if whole["shape"] is None else whole["shape"]
            whole["pieces"] += entry["pieces"]
    for path, entry in entries.items():
        _check_covered(path, entry)
    manifest = {
        "format": FORMAT,
        **about,
        "processes": [{k: v for k, v in report.items() if k not in ("entries", "bytes")} for report in reports],
        "files": {f"rank-{index:05d}.safetensors": report["bytes"] for index, report in enumerate(reports)},
        "entries": entries,
    }
    write_json(os.path.join(folder, MANIFEST), {"hash": _hash_of_json(manifest), "manifest": manifest})
    flush_folder(os.path.dirname(folder))
    for index in range(num_processes):
        os.remove(report_path(folder, index))


def report_path(folder: str, index: int) -> str:
    """Return the path of a process's report."""
    return os.path.join(folder, f"rank-{index:05d}.json")


def write_json(path: str, value: Any) -> None:
    """Write `value` to a JSON file atomically, so readers never find a part of it."""
    with open(f"{path}.unfinished", "w", encoding="utf-8") as file:
        json.dump(value, file)
    _finish(path)


def read_json(path: str) -> Any:
    """Read a JSON file.

    Raises:
        OSError: if the file cannot be read, or is not JSON.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise OSError(f"The file {path!r} is damaged: {error}") from error


def _finish(path: str) -> None:
    with open(f"{path}.unfinished", "rb+") as file:
        os.fsync(file.fileno())
    os.replace(f"{path}.unfinished", path)
    flush_folder(os.path.dirname(path))


def _split(part: Part) -> Iterator[Part]:
    """Cut a part of an array into pieces of at most `PIECE_BYTES`."""
    start, values = part
    if values.nbytes <= PIECE_BYTES or values.size == 1:
        yield part
        return
    axis = next(axis for axis, length in enumerate(values.shape) if length > 1)
    rows = max(1, PIECE_BYTES * values.shape[axis] // values.nbytes)
    for first in range(0, values.shape[axis], rows):
        index = (*(slice(None) for _ in range(axis)), slice(first, first + rows))
        moved = (*start[:axis], start[axis] + first, *start[axis + 1 :])
        yield from _split(Part(moved, values[index]))


def _storable(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values).reshape(values.shape)
    is_known = values.dtype.kind in "biuf" or values.dtype == ml_dtypes.bfloat16
    return values if is_known and values.dtype.isnative else values.view("uint8")


def _hash(values: np.ndarray) -> str:
    return hashlib.sha256(values.reshape(-1).view("uint8").data).hexdigest()[:16]


def _hash_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _check_covered(path: str, entry: dict[str, Any]) -> None:
    shape = entry["shape"]
    if shape is None:
        raise ValueError(f"The shape of the array `{path}` is unknown on all processes.")
    item = _dtype(entry["dtype"]).itemsize
    boxes = [(start, _shape_of(entry, stored, item)) for _, _, start, stored, _ in entry["pieces"]]
    num_elements = sum(math.prod(size) for _, size in boxes)
    has_all = num_elements == math.prod(shape)
    if not has_all or _overlap(boxes):
        kind = "overlapping pieces" if has_all else "pieces"
        raise ValueError(
            f"The saved pieces of the array `{path}` must contain each of its {math.prod(shape)} elements once. "
            f"Received: {kind} with {num_elements} elements. Check that all processes train the same model."
        )


def _overlap(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether any two of the boxes (start and size per dimension) have an element in common."""
    boxes = sorted(boxes, key=lambda box: tuple(box[0]))
    for i, (start, size) in enumerate(boxes):
        for other, length in boxes[i + 1 :]:
            if other and other[0] >= start[0] + size[0]:
                break  # the boxes are sorted, so all later boxes begin after this one ends
            if all(a < b + m and b < a + n for a, n, b, m in zip(start, size, other, length)):
                return True
    return False


# -- reading ---------------------------------------------------------------------------------------------------------


class Checkpoint:
    """Reads the pieces of a complete checkpoint.

    Args:
        folder: the folder of one save.

    Raises:
        OSError: if the folder has no manifest, or a damaged one; if a file is missing or has another size.
        ValueError: if a newer version of this package wrote the manifest.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        path = os.path.join(folder, MANIFEST)
        content = read_json(path)
        if not isinstance(content, dict) or content.get("hash") != _hash_of_json(content.get("manifest")):
            raise OSError(f"The file {path!r} is damaged: its content does not match the hash stored in it.")
        self.manifest: dict[str, Any] = content["manifest"]
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"This version reads checkpoints of format {FORMAT}. Received: format {self.manifest['format']} in "
                f"{folder!r}. Install the version of keras_shardopt that wrote the checkpoint."
            )
        for name, size in self.manifest["files"].items():
            path = os.path.join(folder, name)
            found = os.path.getsize(path)  # raises FileNotFoundError if the file is missing
            if found != size:
                raise OSError(f"The file {path!r} is damaged: it must have {size} bytes. Received: {found} bytes.")
        self._files: dict[str, Any] = {}

    def __getitem__(self, path: str) -> StoredArray:
        return StoredArray(self, path, self.manifest["entries"][path])

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest["entries"])

    def __contains__(self, path: str) -> bool:
        return path in self.manifest["entries"]

    def verify(self, process: tuple[int, int] = (1, 0)) -> None:
        """Read pieces and check their hashes: all, or the share of `process` = (number of processes, index).

        Raises:
            OSError: if a piece is damaged.
        """
        num_processes, index = process
        pieces = [piece for entry in self.manifest["entries"].values() for piece in entry["pieces"]]
        for piece in pieces[index::num_processes]:
            self.read(piece)

    def read(self, piece: Sequence[Any]) -> np.ndarray:
        """Return the values of a `piece` that the manifest lists, in the stored dtype, after a check of their hash.

        Raises:
            OSError: if the piece is damaged or missing.
        """
        from safetensors import SafetensorError, safe_open

        name, key, _, shape, digest = piece
        path = os.path.join(self.folder, name)
        try:
            if name not in self._files:
                self._files[name] = safe_open(path, "np")
            values: np.ndarray = self._files[name].get_tensor(key)
        except SafetensorError as error:
            raise OSError(f"The file {path!r} is damaged: {error}") from error
        if list(values.shape) != list(shape) or _hash(values) != digest:
            raise OSError(
                f"The file {path!r} is damaged: the piece {key!r} does not match its hash in the "
                "manifest. Copy the file again, or load an earlier checkpoint."
            )
        return values


class StoredArray:
    """An array of a checkpoint. Only the pieces that a caller uses are read, when they are used.

    Indexing with slices, `flat_range` and `np.asarray` return NumPy arrays.
    """

    def __init__(self, checkpoint: Checkpoint, path: str, entry: dict[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self.path = path
        self.shape: tuple[int, ...] = tuple(entry["shape"])
        self.dtype = _dtype(entry["dtype"])
        self.notes: dict[str, Any] = entry["notes"]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.flat_range(0, self.size).reshape(self.shape)
        return values if dtype is None else values.astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if not self.shape or not index:
            return np.asarray(self)[index]
        start, stop, _ = index[0].indices(self.shape[0])
        row = math.prod(self.shape[1:])
        rows = self.flat_range(start * row, stop * row).reshape(stop - start, *self.shape[1:])
        return rows[(slice(None), *index[1:])]

    def flat_range(self, start: int, stop: int) -> np.ndarray:
        """Return elements `start` to `stop` of the flattened array."""
        if self._entry["is_flat"] or not self.shape:
            return self._filled((stop - start,), start)
        row = max(1, math.prod(self.shape[1:]))
        first, last = start // row, -(-stop // row)
        return self._filled((last - first, *self.shape[1:]), first).reshape(-1)[
            start - first * row : stop - first * row
        ]

    def _filled(self, shape: tuple[int, ...], first: int) -> np.ndarray:
        """Return the `shape[0]` rows that start at row `first`. A row of a flat array is an element."""
        result = np.empty(shape, self.dtype)
        for piece in self._entry["pieces"]:
            start, size = piece[2] or [0], _shape_of(self._entry, piece[3], self.dtype.itemsize) or [1]
            low, high = max(start[0], first), min(start[0] + size[0], first + shape[0])
            if low < high or (low == high and not result.size):
                values = self._checkpoint.read(piece).view(self.dtype).reshape(size)
                box = tuple(slice(s, s + n) for s, n in zip(start[1:], size[1:]))
                result[(slice(low - first, high - first), *box)] = values[low - start[0] : high - start[0]]
        return result


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _shape_of(entry: Mapping[str, Any], stored: Sequence[int], item: int) -> list[int]:
    """Return a piece's shape in elements, given its shape `stored` in the file. Files hold some dtypes as bytes."""
    is_bytes = _storable(np.empty((0,), _dtype(entry["dtype"]))).dtype != _dtype(entry["dtype"])
    return [*stored[:-1], stored[-1] // item] if is_bytes else list(stored)
