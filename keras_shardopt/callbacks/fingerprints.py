"""Fingerprints (hashes) of weights after each update, to find the first difference between two runs."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import processes
from keras_shardopt.wrapping.slots import without_counters


class Fingerprints(keras.callbacks.Callback):
    """Writes a fingerprint (hash) of each weight after each update. `first_difference` compares the files of two runs.

    Each line of the file is a JSON object. If the optimizer has made updates before a `fit`, this `fit` appends lines;
    otherwise it overwrites the file. Only process 0 writes. The callback slows training, because it reads all weights.

    Args:
        filepath: str or path of the file.
        every: int >= 1 (default 1). Fingerprints are written after every `every`-th update.

    Raises:
        TypeError, ValueError: if `filepath` is not a path, or `every` is not an int >= 1.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks, tempfile
        >>> def train(file, rate):
        ...     keras.utils.set_random_seed(1)
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="last")])
        ...     model.compile(keras.optimizers.SGD(rate), "mse")
        ...     prints = ks.callbacks.Fingerprints(file)
        ...     model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[prints], verbose=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for file, rate in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        ...         train(f"{folder}/{file}", rate)
        ...     print(ks.callbacks.first_difference(f"{folder}/a", f"{folder}/b"))
        ...     print(ks.callbacks.first_difference(f"{folder}/a", f"{folder}/c"))
        None
        Difference(update=1, variable='sequential/last/kernel')
    """

    def __init__(self, filepath: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__()
        if not isinstance(filepath, (str, os.PathLike)):
            raise TypeError(f"`filepath` must be a str or a path. Received: filepath={filepath!r}")
        self.filepath = pathlib.Path(filepath)
        self.every = check.integer("every", every)
        self._last = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts a new file, or continues the existing file if the optimizer has already made updates."""
        self._last = self._updates()
        if self._writes:
            self.filepath.parent.mkdir(parents=True, exist_ok=True)
            names = without_counters([weight.path for weight in self.model.weights])
            self._write({"variables": names}, anew=self._last == 0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a line if the batch has led to an update, and `every` divides the number of updates."""
        updates = self._updates()
        if updates != self._last and updates % self.every == 0 and self._writes:
            self._write({"update": updates, "fingerprints": [fingerprint(weight) for weight in self.model.weights]})
        self._last = updates

    @property
    def _writes(self) -> bool:
        return processes.process()[1] == 0

    def _updates(self) -> int:
        return int(ops.convert_to_numpy(self.model.optimizer.iterations))

    def _write(self, line: dict[str, Any], anew: bool = False) -> None:
        with open(self.filepath, "w" if anew else "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def fingerprint(variable: Any) -> str:
    """Returns a hash of a variable's bits, shape and dtype, in hexadecimal digits."""
    value = np.ascontiguousarray(ops.convert_to_numpy(variable))
    kind = repr((value.shape, str(variable.dtype))).encode()
    return hashlib.blake2b(value.tobytes(), digest_size=8, key=hashlib.sha256(kind).digest()).hexdigest()


class Difference(NamedTuple):
    """The first difference between two runs."""

    update: int
    """The first update after which the runs differ, counted from 1."""

    variable: str
    """The path of the first variable that differs."""


def first_difference(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference | None:
    """Returns the first update after which two runs differ, and the first variable that differs.

    Args:
        a: the file that `Fingerprints` wrote in one run.
        b: the file of the other run.

    Returns:
        A `Difference` with the fields `update` and `variable`. None if the files agree on all updates that both have.

    Raises:
        TypeError, ValueError: if `a` or `b` is not a file of `Fingerprints`; if the runs have different variables, or
            the files have no update in common.
    """
    (names, one), (others, two) = _read("a", a), _read("b", b)
    if names != others:
        differing = sorted(set(names) ^ set(others)) or names
        raise ValueError(
            "`a` and `b` must come from runs with the same variables, in the same order. Received: files that differ "
            f"in {check.listed(differing, ', ')}. Give the layers names, or build the layers in the same order."
        )
    common = sorted(one.keys() & two.keys())
    if not common:
        raise ValueError(
            f"`a` and `b` must contain at least one update with the same number. Received: none among {len(one)} "
            f"updates in {str(a)!r} and {len(two)} updates in {str(b)!r}. Use the same `every` in both runs."
        )
    for update in common:
        for name, left, right in zip(names, one[update], two[update]):
            if left != right:
                return Difference(update, name)
    return None


def _read(name: str, file: Any) -> tuple[list[str], dict[int, list[str]]]:
    """Returns a file's variable names, and the last fingerprints of each update. Errors call the file `name`."""
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a str or a path. Received: {name}={file!r}")
    names: list[str] = []
    updates = {}
    try:
        for text in pathlib.Path(file).read_text(encoding="utf-8").splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # the process was killed while it wrote this line
            line = json.loads(text)
            names = line.get("variables", names)
            if "update" in line:
                updates[line["update"]] = line["fingerprints"]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`{name}` must be a file that `Fingerprints` has written. Received: {name}={file!r} ({error})."
        ) from error
    return names, updates
