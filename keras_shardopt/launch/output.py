"""Copies the output of a job's processes with a prefix, and finds the exception that ended a process."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

_LONGEST_LINE = 1 << 20
"""The maximum length of a line. A longer line is cut, because each new piece of a line copies the whole line."""


class Output:
    """Copies the output of processes to the streams of this process, with a prefix on each line.

    A progress bar rewrites its line after a carriage return. On a terminal, the bar of the first process moves.
    In a file, and for other processes, only the final line of a bar is printed.

    Args:
        first: the process whose bars move.
        log_dir: path or None. A directory with one file per process, to which its lines are appended.
    """

    def __init__(self, first: int, log_dir: str | None = None) -> None:
        self._first, self._log_dir = first, log_dir
        self._lock = threading.Lock()
        self._terminal = next((out for out in (sys.stdout, sys.stderr) if out.isatty()), sys.stdout)
        self._bar = ""  # the bar now shown in the terminal's last line
        self._readers: list[threading.Thread] = []
        self.raised: dict[int, tuple[float, str]] = {}
        """For each process that has printed a traceback: the time and the last line of its latest traceback."""

    def copy(self, process: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        """Starts threads that copy the output of a process."""
        for stream, out in ((stdout, sys.stdout), (stderr, sys.stderr)):
            reader = threading.Thread(target=self._copy, args=(process, stream, out), daemon=True)
            reader.start()
            self._readers.append(reader)

    def say(self, words: str) -> None:
        """Prints a line of the launcher itself."""
        self._write([f"keras_shardopt.launch: {words}"], sys.stderr)

    def join(self) -> None:
        """Waits for the remaining output, at most a second per stream: child processes can keep a stream open."""
        for reader in self._readers:
            reader.join(1.0)

    def _copy(self, process: int, stream: IO[bytes] | None, out: IO[str]) -> None:
        assert stream is not None
        shows_bars = process == self._first and out.isatty()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tracebacks = _Tracebacks()
        rest = ""
        with stream:
            while chunk := os.read(stream.fileno(), 65536):
                *lines, rest = (rest + decoder.decode(chunk)).split("\n")
                for line in lines:
                    if (error := tracebacks.error_of(line)) is not None:
                        self.raised[process] = time.monotonic(), error
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], ""
                bar = ""
                if "\r" in rest:  # keep only the text after the last \r
                    bar = f"[{process}] {_shown(rest)}"
                    rest = "\r" + _shown(rest)
                self._print(process, lines, out, bar, shows_bars)
            self._print(process, [rest] if rest else [], out, "", shows_bars)

    def _print(self, process: int, lines: Sequence[str], out: IO[str], bar: str, shows_bars: bool) -> None:
        lines = [_shown(line) for line in lines]
        if lines and self._log_dir is not None:
            name = os.path.join(self._log_dir, f"rank-{process}.log")
            with self._lock, contextlib.suppress(OSError), open(name, "a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        self._write([f"[{process}] {line}" for line in lines], out, bar, shows_bars)

    def _write(self, lines: Sequence[str], out: IO[str], bar: str = "", shows_bars: bool = False) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            before, self._bar = self._bar, bar if shows_bars else self._bar
            if before and (lines or self._bar != before):
                self._terminal.write("\r\x1b[K")  # clear the bar's line
                self._terminal.flush()
            out.write("".join(f"{line}\n" for line in lines))
            out.flush()
            if self._bar and (lines or self._bar != before):
                self._terminal.write(f"\x1b[?7l{self._bar}\x1b[?7h")  # without line wrap: \r clears only one line
                self._terminal.flush()


def _shown(line: str) -> str:
    """Returns the part of a line after its last carriage return, as a terminal shows it."""
    parts = [part.rstrip("\b") for part in line.split("\r")]
    return next((part for part in reversed(parts) if part.strip()), parts[-1])


_RANK = re.compile(r"^\[rank\d+\]: ")
"""The prefix that PyTorch adds to each line of a traceback."""


class _Tracebacks:
    """Finds uncaught errors in the output of a program."""

    def __init__(self) -> None:
        self._is_inside = False
        self._before = ""

    def error_of(self, line: str) -> str | None:
        """Returns the line if it ends the traceback of an uncaught error. Otherwise returns None."""
        line = _RANK.sub("", line.rstrip("\r"))
        # A traceback ends with an unindented line that names the exception. Some versions of Python do not indent the
        # markers (`^^^^`) under code either, so also require a letter at the start.
        found = self._is_inside and line[:1].isidentifier()
        if line == "Traceback (most recent call last):":
            # Ignore tracebacks of threads and of `__del__`, because these errors do not end the process.
            self._is_inside = not self._before.startswith(("Exception in thread", "Exception ignored"))
            found = False
        elif found:
            self._is_inside = False
        self._before = line
        return line if found else None
