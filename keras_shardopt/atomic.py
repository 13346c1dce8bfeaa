"""Files that are whole at any moment: the one before until the new one is complete, and nothing in between.

Hides how: what is written goes into a folder of its own beside the file, is brought to the disk, and takes the file's
name in one step. What a killed program leaves of that is found by its name and removed by the next one that writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time

from keras_shardopt.arguments import with_article

ABANDONED_SECONDS = 3600
"""After how long without a change a folder is taken for left behind, where it cannot be asked who made it."""

_HOST = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
_PATTERN = re.compile(r"\.keras_shardopt-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}\.unfinished")

# Those that this process is writing now: after a restart another program may have had the same host and number.
_mine: set[str] = set()


class Unfinished:
    """A file that takes the place of another when it is finished.

    Args:
        path: the file to replace; it need not be there yet, but its folder must. Of a link, what it points to.

    Raises:
        OSError: if the folder cannot be written to, or something that is no file is there.
    """

    def __init__(self, path: str) -> None:
        self._target = os.path.realpath(path)
        folder, name = os.path.split(self._target)
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            kind = "folder" if os.path.isdir(self._target) else "device or pipe"
            error = IsADirectoryError if kind == "folder" else OSError
            raise error(f"There must be a file, or nothing. Received: {path!r}, which is {with_article(kind)}.")
        _remove_abandoned(folder)
        mine = f".keras_shardopt-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.unfinished"
        self._scratch = os.path.join(folder, mine)
        try:
            # A folder, so that what others write beside the file goes with it, and the file has its own name and mode.
            os.mkdir(self._scratch)
        except OSError as error:
            why = "there is no such folder" if isinstance(error, FileNotFoundError) else error.strerror
            raise type(error)(f"`{path}` cannot be written: {why} ({folder!r}).") from error
        _mine.add(self._scratch)
        self.path = os.path.join(self._scratch, name)

    def finish(self, keep_as: str | None = None) -> None:
        """Gives what was written to `self.path` the name of the file, and what had that name the name `keep_as`."""
        try:
            with open(self.path, "rb+") as file:
                # Before the name: else a crash of the machine may leave the name and not what is in it.
                os.fsync(file.fileno())
            if keep_as is not None and os.path.exists(self._target):
                os.replace(self._target, keep_as)
            os.replace(self.path, self._target)
            _sync_folder(os.path.dirname(self._target))
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes what was written, unless it is finished."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        _mine.discard(self._scratch)


def _remove_abandoned(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder or "."):
            found = _PATTERN.fullmatch(name)
            path = os.path.join(folder, name)
            if found is not None and path not in _mine and _is_abandoned(path, found["host"], int(found["process"])):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str, host: str, process: int) -> bool:
    if host == _HOST and (process == os.getpid() or not _is_alive(process)):
        return True
    # On another host, or the number has gone to another program: what is being written changes.
    changed = [os.lstat(path).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path))]
    return time.time() - max(changed) > ABANDONED_SECONDS


def _is_alive(process: int) -> bool:
    if os.name == "nt":
        return True  # there, to ask is to kill
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, but somebody else's
        return True
    return True


def _sync_folder(path: str) -> None:
    # Or the new name may be lost although the file is not. Not every system can open a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
