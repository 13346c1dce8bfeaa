"""Files that are whole at any moment: the one before until the new one is complete, and nothing in between.

Hides how: what is written goes into a separate folder next to the file, is brought to the disk, and takes the file's
name, mode and owner in one step. What a killed program leaves of that is found by its name and removed by the next one
that writes. Who writes holds a lock in its folder, which the kernel releases when the program dies, whatever process
number or host name a container shows.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time

ABANDONED_SECONDS = 3600
"""After how long without a change a folder is taken for left behind, where its lock does not say so."""

_LOCK = ".lock"


def _kernel() -> str:
    """Names the kernel that this program runs on, for which locks hold even where a file system has none of its own.

    A host name will not do: containers on several machines may share it.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            name = file.read()
    except OSError:  # on Linux a sandbox, of which there may be several; elsewhere there are no containers
        name = secrets.token_hex(8) if sys.platform == "linux" else socket.gethostname()
    return re.sub(r"[^A-Za-z0-9.]", "", name)


_KERNEL = _kernel()
_PATTERN = re.compile(r"\.keras_shardopt-(?P<kernel>.+)-[0-9a-f]{8}\.unfinished")


class Unfinished:
    """A file that takes the place of another when it is finished, with the mode and owner of that one.

    Args:
        path: the file to replace; it need not be there yet, but its folder must. Of a link, what it points to.

    Raises:
        OSError: if the folder cannot be written to, or something that is no file is there.
    """

    def __init__(self, path: str) -> None:
        self._target = os.path.realpath(path)
        folder, name = os.path.split(self._target)
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            is_folder = os.path.isdir(self._target)
            raise (IsADirectoryError if is_folder else OSError)(
                f"There must be a file, or nothing. Received: {path!r}, "
                f"which is {'a folder' if is_folder else 'a device or pipe'}."
            )
        _remove_abandoned(folder)
        self._scratch = os.path.join(folder, f".keras_shardopt-{_KERNEL}-{secrets.token_hex(4)}.unfinished")
        try:
            # A folder, so that what others write next to the file goes with it, and the file has its own name and mode.
            # For nobody else: the file that is replaced may be private, and gives its mode to the new one at the end.
            os.mkdir(self._scratch, 0o700)
        except OSError as error:
            why = "there is no such folder" if isinstance(error, FileNotFoundError) else error.strerror
            raise type(error)(f"`{path}` cannot be written: {why} ({folder!r}).") from error
        self._lock = _take_lock(self._scratch)
        self.path = os.path.join(self._scratch, name)

    def finish(self, keep_as: str | None = None) -> None:
        """Gives what was written to `self.path` the name of the file, and what had that name the name `keep_as`."""
        try:
            with open(self.path, "rb+") as file:
                _take_mode_and_owner(self.path, self._target)
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
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _take_mode_and_owner(path: str, target: str) -> None:
    """Gives the file at `path` the mode of the one that it will replace, and its owner where that is permitted."""
    try:
        before = os.stat(target)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(before.st_mode)
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(path, -1, before.st_gid)
        with contextlib.suppress(OSError):  # of another user, which only root can give
            os.chown(path, before.st_uid, -1)
        if os.stat(path).st_gid != before.st_gid:
            # Another group gets no more than everybody had.
            mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    with contextlib.suppress(OSError):  # no file system of Unix
        os.chmod(path, mode)  # after the owner, whose change takes bits away


# -- what is left behind ---------------------------------------------------------------------------------------------


def _remove_abandoned(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder or "."):
            found = _PATTERN.fullmatch(name)
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # another program removes it, too
                if found is not None and _is_abandoned(path, found["kernel"]):
                    shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str, kernel: str) -> bool:
    held = _is_held(path)
    if held is not None and (held or kernel == _KERNEL):
        return not held
    # Written on another machine, where a network file system may keep the lock to itself, or without a lock: what is
    # being written changes.
    changed = [os.lstat(path).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path))]
    return time.time() - max(changed) > ABANDONED_SECONDS


def _take_lock(scratch: str) -> int | None:
    """Holds a lock in the folder until the result is closed, or this process ends; None where there are no locks."""
    path = os.path.join(scratch, _LOCK)
    with contextlib.suppress(OSError):
        descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor):
            # It has its name only once it is held: nobody finds one that is not yet.
            os.rename(path + ".new", path)
            return descriptor
        os.close(descriptor)
    return None


def _is_held(scratch: str) -> bool | None:
    """Whether somebody holds the lock in the folder; None where that is not known."""
    try:
        descriptor = os.open(os.path.join(scratch, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_free = _try_lock(descriptor)
        return None if is_free is None else not is_free
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Takes the lock, or says that another one has it (False), or that there are no locks here (None)."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network file system without locks
        return None
    return True


def _sync_folder(path: str) -> None:
    # Or the new name may be lost although the file is not. Not every system can open a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
