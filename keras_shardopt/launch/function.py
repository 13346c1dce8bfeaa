"""`launch_processes`: runs a function in several processes, as a notebook needs."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_shardopt import arguments as check
from keras_shardopt.backends import jobs
from keras_shardopt.launch.pickled import CALL, ERROR, RESULT, pickler


def launch_processes(
    function: Callable[..., Any],
    num_processes: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Runs a function in several new processes that train one model together, and returns the result of process 0.

    It starts the processes with `python -m keras_shardopt.launch` on the backend of KERAS_BACKEND, and prints their
    output. The function must enter `keras_shardopt.data_parallel()`. The processes share nothing with this one: they
    get pickled copies of the function and its arguments. So import what it uses inside the function. Needs
    `pip install cloudpickle`.

    Args:
        function: a function, also one that is defined in a notebook. It can return arrays or a Keras model. For a
            model with custom classes, call `launch_processes` inside `keras.saving.custom_object_scope`.
        num_processes: int >= 1. The number of processes on this machine.
        args: its positional arguments: data, and no models or tensors of the backend.
        kwargs: dict or None. Its keyword arguments.

    Returns:
        What the function returns in process 0.

    Raises:
        ValueError: if `num_processes` is less than 1, or KERAS_BACKEND is not set.
        TypeError: if `function` is not callable, `args` not a sequence, or `kwargs` not a dict.
        ImportError: if cloudpickle is not installed.
        RuntimeError: if a process ends without an error of Python. Otherwise, the error of the first process that
            failed, with its traceback. All other processes have ended then, as after an interrupt.

    Example:
        >>> import keras_shardopt as ks
        >>> def train():
        ...     import keras_shardopt as ks
        ...     with ks.data_parallel() as replicas:
        ...         return replicas.num_processes
        >>> ks.launch_processes(train, num_processes=2)  # doctest: +SKIP
        2
    """
    num_processes = check.integer("num_processes", num_processes)
    if not callable(function) or not isinstance(args, (list, tuple)) or not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(
            "`function` must be callable, `args` a list or tuple, and `kwargs` a dict or None. Received: "
            f"function={function!r}, args={type(args).__name__}, kwargs={type(kwargs).__name__}"
        )
    if "KERAS_BACKEND" not in os.environ:
        raise ValueError(
            "`launch_processes` starts processes with the backend of this environment variable. Received: no "
            'KERAS_BACKEND. Set it before `import keras`: `os.environ["KERAS_BACKEND"] = "torch"`.'
        )
    call = pickler().dumps((function, tuple(args), dict(kwargs or {})))
    with tempfile.TemporaryDirectory() as name:  # only this user can read it
        folder = pathlib.Path(name)
        (folder / CALL).write_bytes(call)
        status = _run(folder, num_processes)
        errors = sorted(folder.glob(f"{ERROR}*"), key=lambda file: file.stat().st_mtime_ns)
        if status and errors:
            error, text = pickle.loads(errors[0].read_bytes())
            raise error from _RemoteTraceback(text)
        if status:
            raise RuntimeError(
                "All processes must end without errors. Received: the exit status "
                f"{status} of `python -m keras_shardopt.launch --nproc {num_processes}`. Read its last line above."
            )
        if not (folder / RESULT).exists():
            raise RuntimeError(
                "The function must return. Received: a process 0 that ended with exit status 0 before, as after "
                "`sys.exit()`. Return in place of that call."
            )
        return pickle.loads((folder / RESULT).read_bytes())


class _RemoteTraceback(Exception):
    """Prints the traceback of another process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text}"


def _run(folder: pathlib.Path, num_processes: int) -> int:
    """Runs the call in `folder`, and prints the output of its processes. Returns the exit status of the launcher."""
    launcher = [sys.executable, "-m", "keras_shardopt.launch", "--nproc", str(num_processes)]
    process = subprocess.Popen(
        [*launcher, "-m", "keras_shardopt.launch.call", str(folder)],
        env={**jobs.alone(), "PYTHONPATH": os.pathsep.join(str(path) or os.getcwd() for path in sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt reaches this process only, which passes it on once
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                print(line, end="", flush=True)
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its processes, also if SIGINT is ignored
            process.wait()
