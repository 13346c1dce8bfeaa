"""Files that TensorBoard reads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np


def checked_log_dir(log_dir: Any) -> None:
    """Raises TypeError unless it is a path or None."""
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(f"`log_dir` must be a path or None. Received: log_dir={log_dir!r}")


_num_files = itertools.count()


def event_writer(log_dir: Any) -> Callable[[dict[str, Any] | None, int], None]:
    """A function of tags with their values and a step, that writes them; None instead of tags ends the file."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Summaries are written with `tensorboardX`, which is not installed. "
            "Run `pip install tensorboardX`, or pass `log_dir=None` to write none."
        ) from error
    # Files are named by the second in which they are made; two of the same one would be one.
    suffix = f".{os.getpid()}.{next(_num_files)}"
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
