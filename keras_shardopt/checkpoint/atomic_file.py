"""Replaces a file atomically: until the new file is complete, readers find the old file.

A new file is written in a separate folder next to the old one, flushed to disk, given the mode and owner of the old
file, and renamed. The writer holds a lock in the folder. The kernel releases the lock when the writer dies, so the next
writer can detect and remove folders of killed programs. Process ids would not work, because containers reuse them.
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
"""A folder without usable locks counts as abandoned after this time without a change."""

_LOCK = ".lock"


def _kernel() -> str:
    # Locks work within one kernel. Identify it by its boot id: containers of two machines can share a host name.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            name = file.read()
    except OSError:  # not Linux, or a Linux sandbox without `/proc`
        name = secrets.token_hex(8) if sys.platform == "linux" else socket.gethostname()
    return re.sub(r"[^A-Za-z0-9.]", "", name)


_KERNEL = _kernel()
_PATTERN = re.compile(r"\.keras_shardopt-(?P<kernel>.+)-[0-9a-f]{8}\.unfinished")


class Unfinished:
    """A new file that replaces the file at `path` when finished. The new file gets the mode and owner of the old file.

    An old file need not exist, but its folder must. If `path` is a link, the target of the link is replaced. Raises
    OSError if the folder is not writable, or if `path` is not a file.
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
            # Write in a new folder, because Keras also writes temporary files next to the new file. Let only the owner
            # read this folder, because the old file may be readable by its owner only.
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
                # Flush before the rename. Otherwise the renamed file can be incomplete after a crash of the machine.
                os.fsync(file.fileno())
            if keep_as is not None and os.path.exists(self._target):
                os.replace(self._target, keep_as)
            os.replace(self.path, self._target)
            flush_folder(os.path.dirname(self._target))
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the new file unless it is finished."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _take_mode_and_owner(path: str, target: str) -> None:
    """Gives the new file the mode and, if permitted, the owner of the file at `target`."""
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
            # The new file has another group, so grant this group only rights that the old file grants to all users.
            mode = mode & ~0o070 | (mode & 0o007) << 3 & mode
    with contextlib.suppress(OSError):  # not a Unix file system
        os.chmod(path, mode)  # after `chown`, because `chown` clears mode bits


# -- abandoned folders -----------------------------------------------------------------------------------------------


def _remove_abandoned(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder or "."):
            found = _PATTERN.fullmatch(name)
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # perhaps another program removes the folder now
                if found is not None and _is_abandoned(path, found["kernel"]):
                    shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str, kernel: str) -> bool:
    held = _is_held(path)
    if held is not None and (held or kernel == _KERNEL):
        return not held
    # Without locks, or if another machine wrote the folder, only the time of the last change shows whether it is used.
    changed = [os.lstat(path).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path))]
    return time.time() - max(changed) > ABANDONED_SECONDS


def _take_lock(scratch: str) -> int | None:
    """Locks the folder until the returned descriptor is closed, or this process ends. Returns None without locks."""
    path = os.path.join(scratch, _LOCK)
    with contextlib.suppress(OSError):
        descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor):
            # Rename the lock file after it is locked, so other programs never find it unlocked.
            os.rename(path + ".new", path)
            return descriptor
        os.close(descriptor)
    return None


def _is_held(scratch: str) -> bool | None:
    """Returns whether a program holds the lock of the folder; None if this is unknown."""
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
    """Takes the lock, and returns True; False if another program holds the lock; None if locks are not supported."""
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


def flush_folder(path: str) -> None:
    """Flush a folder, so renames in it survive a crash of the machine."""
    with contextlib.suppress(OSError):  # some systems cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
