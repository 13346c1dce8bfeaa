"""A process of `launch_processes`: `python -m keras_shardopt.launch.call FOLDER` runs the function stored there."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import threading
import traceback

from keras_shardopt.backends.active import placement, processes
from keras_shardopt.launch.pickled import CALL, ERROR, RESULT, pickler


def _main(folder: pathlib.Path) -> None:
    """Runs the pickled call in `folder`, and stores its result or error there."""
    try:
        function, args, kwargs = pickle.loads((folder / CALL).read_bytes())
        result = function(*args, **kwargs)
        # Pickle on all processes, because each may hold a part of the model. Pickling creates an optimizer: leave the
        # strategy, so each process can create variables alone.
        pickled = placement.outside_strategy(lambda: pickler().dumps(result))
        if processes.process()[1] == 0:
            _write(folder / RESULT, pickled)
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickled := pickler().dumps((error, text)))
        except Exception:  # some errors cannot be pickled, and some cannot be unpickled
            pickled = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
        _write(folder / f"{ERROR}{os.getpid()}", pickled)
        raise


def _write(file: pathlib.Path, content: bytes) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(file)


def _end_with_caller(pipe: int) -> None:
    """Ends this process when the pipe closes: the program that called `launch_processes` has then ended."""
    while os.read(pipe, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_caller, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody can answer, so `input()` raises an error
    _main(pathlib.Path(sys.argv[1]))
