"""Atomic files: until the new file is complete, readers find the old one.

A new file is written in a separate folder next to the old one, flushed to disk, and renamed with the old file's mode
and owner. The writer holds a lock in that folder. The kernel releases it when the program dies, in a container as well
(process numbers and host names are not reliable there). The next writer removes folders that killed programs left.
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
"""Without a lock that proves it, a folder counts as abandoned if nothing in it changed for this time, in seconds."""

_LOCK = ".lock"


def _kernel() -> str:
    # Locks are valid within one kernel. Containers on several machines may share a host name.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            name = file.read()
    except OSError:  # on Linux one of perhaps several sandboxes; other systems have no containers
        name = secrets.token_hex(8) if sys.platform == "linux" else socket.gethostname()
    return re.sub(r"[^A-Za-z0-9.]", "", name)


_KERNEL = _kernel()
_PATTERN = re.compile(r"\.keras_shardopt-(?P<kernel>.+)-[0-9a-f]{8}\.unfinished")


class Unfinished:
    """A file that replaces the one at `path` when it is finished, and takes its mode and owner.

    The old file may be missing, but its folder must exist. A link stays a link: its target is replaced. Raises OSError
    if the folder is not writable, or if `path` is not a file.
    """

    def __init__(self, path: str) -> None:
        self._target = os.path.realpath(path)
        folder, name = os.path.split(self._target)
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            is_folder = os.path.isdir(self._target)
            raise (IsADirectoryError if is_folder else OSError)(
                f"The path must name a file. Received: {path!r}, "
                f"which is {'a folder' if is_folder else 'a device or pipe'}."
            )
        _remove_abandoned(folder)
        self._scratch = os.path.join(folder, f".keras_shardopt-{_KERNEL}-{secrets.token_hex(4)}.unfinished")
        try:
            # A folder also holds files that Keras writes next to this file, and leaves name and mode of the file free.
            # It is private, because the replaced file may be: its mode is copied only at the end.
            os.mkdir(self._scratch, 0o700)
        except OSError as error:
            why = "there is no such folder" if isinstance(error, FileNotFoundError) else error.strerror
            raise type(error)(f"`{path}` cannot be written: {why} ({folder!r}).") from error
        self._lock = _take_lock(self._scratch)
        self.path = os.path.join(self._scratch, name)

    def finish(self, keep_as: str | None = None) -> None:
        """Renames the new file to its final name, and the old file to `keep_as` if given."""
        try:
            with open(self.path, "rb+") as file:
                _take_mode_and_owner(self.path, self._target)
                # Before the rename: after a crash of the machine, the new name could have incomplete content.
                os.fsync(file.fileno())
            if keep_as is not None and os.path.exists(self._target):
                os.replace(self._target, keep_as)
            os.replace(self.path, self._target)
            _sync_folder(os.path.dirname(self._target))
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the new file unless it is finished."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _take_mode_and_owner(path: str, target: str) -> None:
    """Copies the mode of the file that will be replaced, and its owner if permitted."""
    try:
        before = os.stat(target)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(before.st_mode)
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(path, -1, before.st_gid)
        with contextlib.suppress(OSError):  # only root can change the owner to another user
            os.chown(path, before.st_uid, -1)
        if os.stat(path).st_gid != before.st_gid:
            # The new file has another group: grant it no more than the old file granted to all users.
            mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    with contextlib.suppress(OSError):  # not a Unix file system
        os.chmod(path, mode)  # after `chown`, because that clears bits


# -- abandoned folders -----------------------------------------------------------------------------------------------


def _remove_abandoned(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder or "."):
            found = _PATTERN.fullmatch(name)
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # another program may remove it at the same time
                if found is not None and _is_abandoned(path, found["kernel"]):
                    shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str, kernel: str) -> bool:
    held = _is_held(path)
    if held is not None and (held or kernel == _KERNEL):
        return not held
    # Another machine wrote it (a network file system may not share locks), or without a lock: go by the last change.
    changed = [os.lstat(path).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path))]
    return time.time() - max(changed) > ABANDONED_SECONDS


def _take_lock(scratch: str) -> int | None:
    """Takes a lock in the folder until the descriptor is closed or this process ends; None without lock support."""
    path = os.path.join(scratch, _LOCK)
    with contextlib.suppress(OSError):
        descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor):
            # Renamed only after it is locked, so other programs never find an unlocked one.
            os.rename(path + ".new", path)
            return descriptor
        os.close(descriptor)
    return None


def _is_held(scratch: str) -> bool | None:
    """Whether a program holds the lock in the folder; None if unknown."""
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
    """Takes the lock. Returns False if another program holds it, and None without lock support."""
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
    # Makes the rename durable. Some systems cannot open a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
