"""Selects this process's batches of a `keras.utils.PyDataset`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_shardopt.data.part import Part, permutation, same_random_numbers


class PartOfPyDataset(keras.utils.PyDataset):
    """This process's batches of another `PyDataset`: every n-th batch, with n processes."""

    def __init__(self, batches: keras.utils.PyDataset, shuffle: bool, seed: int, part: Part) -> None:
        super().__init__(
            workers=batches.workers,
            use_multiprocessing=batches.use_multiprocessing,
            max_queue_size=batches.max_queue_size,
        )
        self._batches, self._seed, self._part = batches, seed, part
        self._epoch = 0
        self._order: np.ndarray | None = None
        self._shuffle = shuffle
        total = batches.num_batches
        if total is not None:
            part.check_enough(total, "batches")
        elif shuffle:
            raise ValueError(
                "`shuffle` needs a PyDataset that has a length. Received: shuffle=True, with an infinite PyDataset. "
                "Shuffle inside the PyDataset, in the same order on every process."
            )
        self._draw()

    def _draw(self) -> None:
        if self._shuffle:
            self._order = permutation(self._batches.num_batches, self._seed, self._epoch)

    @property
    def num_batches(self) -> int | None:
        """The number of batches of this process; None if the dataset is infinite."""
        total = self._batches.num_batches
        return None if total is None else self._part.size(total)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("An infinite PyDataset has no length.")
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        position = self._part.index + index * self._part.num_parts
        return self._batches[position if self._order is None else int(self._order[position])]

    def on_epoch_begin(self) -> None:
        """Calls the whole dataset's `on_epoch_begin` with random numbers that are equal on all processes."""
        with same_random_numbers(self._seed, self._epoch, 0):
            self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Calls the whole dataset's `on_epoch_end` with random numbers that are equal on all processes."""
        with same_random_numbers(self._seed, self._epoch, 1):
            self._batches.on_epoch_end()
        self._epoch += 1
        self._draw()
