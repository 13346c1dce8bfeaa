"""TensorBoard event files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np


def checked_log_dir(log_dir: Any) -> None:
    """Raise TypeError unless `log_dir` is a path or None."""
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(f"`log_dir` must be a path or None. Received: log_dir={log_dir!r}")


_num_files = itertools.count()


def event_writer(log_dir: Any) -> Callable[[dict[str, Any] | None, int], None]:
    """Return a function of (values by tag, step) that writes to a new event file. Values of None close the file."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Writing summaries requires `tensorboardX`, which is not installed. "
            "Run `pip install tensorboardX`, or pass `log_dir=None` to write no files."
        ) from error
    # Make the name unique, because `tensorboardX` names files by the second, so two writers could use the same file.
    # TensorBoard reads files in the order of their names.
    suffix = f".{os.getpid()}.{next(_num_files):06}"
    writer = SummaryWriter(str(log_dir), filename_suffix=suffix)

    def write(tags: dict[str, Any] | None, step: int) -> None:
        if tags is None:
            writer.close()
            return
        for tag, value in tags.items():
            if isinstance(value, np.ndarray):
                if np.isfinite(value).all():
                    writer.add_histogram(tag, value, step)
            else:
                writer.add_scalar(tag, value, step)
        writer.flush()

    return write
