"""The files through which `launch_processes` and its processes exchange Python objects."""

from __future__ import annotations

from typing import Any

CALL, RESULT, ERROR = "call", "result", "error"


def pickler() -> Any:
    """Returns cloudpickle, which also pickles functions of a notebook."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "`launch_processes` needs cloudpickle, which is not installed. Run `pip install cloudpickle`."
        ) from error
    return cloudpickle
