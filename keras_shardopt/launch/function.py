"""`launch_processes`: runs a function in several processes, also from a notebook."""

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
    output. The function must enter `keras_shardopt.data_parallel()`. The new processes share no memory with the caller:
    they get pickled copies of the function and its arguments. So import modules inside the function. Needs
    `pip install cloudpickle`.

    Args:
        function: a function, also one that is defined in a notebook. It can return arrays or a Keras model, on all
            processes. For a model with custom classes, call `launch_processes` inside
            `keras.saving.custom_object_scope`.
        num_processes: int >= 1. The number of processes on this machine.
        args: list or tuple. The positional arguments of `function`: data, and no models or tensors of the backend.
        kwargs: dict or None. The keyword arguments of `function`.

    Returns:
        The result of the function in process 0.

    Raises:
        ValueError: if `num_processes` is less than 1, or KERAS_BACKEND is not set.
        TypeError: if `function` is not callable, `args` not a sequence, or `kwargs` not a dict.
        ImportError: if cloudpickle is not installed.
        RuntimeError: if a process fails without a Python exception, as after a signal. If a process raises an
            exception, the first such exception is raised here. After any error or interrupt, all processes have ended.

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
            "`launch_processes` needs the environment variable KERAS_BACKEND, so that new processes use the same "
            'backend. Set KERAS_BACKEND before `import keras`: `os.environ["KERAS_BACKEND"] = "torch"`.'
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
                f"All processes must end without errors. Received: the exit status {status} of `python -m "
                f"keras_shardopt.launch --nproc {num_processes}`. The last line of the output above names the cause."
            )
        if not (folder / RESULT).exists():
            raise RuntimeError(
                "The function must return. Received: process 0 ended with exit status 0 before the function returned, "
                "as after `sys.exit()`. Replace `sys.exit()` by `return`."
            )
        return pickle.loads((folder / RESULT).read_bytes())


class _RemoteTraceback(Exception):
    """The cause of an error that another process raised. It shows the traceback of that process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text}"


def _run(folder: pathlib.Path, num_processes: int) -> int:
    """Runs the launcher for the call in `folder`, and prints all output. Returns the launcher's exit status."""
    launcher = [sys.executable, "-m", "keras_shardopt.launch", "--nproc", str(num_processes)]
    process = subprocess.Popen(
        [*launcher, "-m", "keras_shardopt.launch.call", str(folder)],
        env={**jobs.alone(), "PYTHONPATH": os.pathsep.join(str(path) or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,  # closes if this process is killed, which ends the new processes
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # otherwise Ctrl-C would reach the launcher twice: directly, and from this process
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                print(line, end="", flush=True)
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # SIGTERM, because the launcher may ignore SIGINT; the launcher ends its processes
            process.wait()
        process.stdin.close()
