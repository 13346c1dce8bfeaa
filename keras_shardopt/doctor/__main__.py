"""`python -m keras_shardopt.doctor`: examines a job before it trains. Start it like your program, in all processes."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NoReturn

from keras_shardopt.doctor import facts, together
from keras_shardopt.doctor.checks import ERROR, OK, WARNING, Finding, findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this job, and print the report in its first process. Return the exit status: 1 if there are errors."""
    given = _parser().parse_args(arguments)
    if given.child is not None:
        _connect(given.child, given.timeout)
        return 0
    ranks, me, error = _gathered(facts.local(given.directory), given.timeout)
    if error:
        ranks[me]["connection"] = error
    found = findings(ranks)
    if me == 0 or error:  # after a failure, each process prints its own report
        print(_as_json(ranks, found) if given.json else _table(ranks, found), flush=True)
    return int(any(finding.level == ERROR for _, finding in found))


def _gathered(mine: facts.Facts, seconds: float) -> tuple[list[facts.Facts], int, str]:
    """Return a list of facts (a dict per process), the index of this process in the list, and an error text or "".

    After an error, the list may have only `mine`. A child process connects, because JAX and TensorFlow end a process
    that cannot connect to the other processes.
    """
    received: dict[str, Any] = {"ranks": [mine], "me": 0, "done": False}
    error = ""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "mine").write_text(json.dumps(mine))
        command = [sys.executable, "-m", "keras_shardopt.doctor", "--child", name, "--timeout", str(seconds)]
        before = signal.signal(signal.SIGTERM, _stop)
        try:
            with open(folder / "output", "wb") as output:
                limit = 6 * seconds + 300  # the child has its own limits, and this one is for a child that hangs
                ended = subprocess.run(command, stdout=output, stderr=output, timeout=limit, check=False)
            error = _error_in((folder / "output").read_text(errors="replace"), ended.returncode, seconds)
        except (KeyboardInterrupt, _Stopped, subprocess.TimeoutExpired) as stop:
            error = f"{type(stop).__name__.strip('_')} before all processes answered"
        finally:
            signal.signal(signal.SIGTERM, before)
        if (folder / "all").exists():
            received = json.loads((folder / "all").read_text())
    return received["ranks"], received["me"], "" if received["done"] else error or "the process ended without an error"


class _Stopped(BaseException):
    """Raised when the launcher ends this process, because another process has failed."""


def _stop(number: int, frame: Any) -> NoReturn:
    del number, frame
    raise _Stopped


def _error_in(output: str, status: int, seconds: float) -> str:
    """Return the line with the error in the output of a child that failed, or "" if it succeeded."""
    if status == 0:
        return ""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any(line.startswith("Timeout (") for line in lines):
        return f"no answer from all processes within {seconds:g} s"
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
    errors = errors or [line for line in lines if re.search("DEADLINE_EXCEEDED|UNAVAILABLE|ABORTED", line)]
    return [*(lines[-1:] or [f"exit status {status}"]), *errors][-1][:600]


def _connect(folder: pathlib.Path, seconds: float) -> None:
    """Run as the child: connect to the other processes, and write the facts of all processes to a file."""
    mine = json.loads((folder / "mine").read_text())
    received: dict[str, Any] = {"done": False}

    def store(ranks: list[facts.Facts]) -> None:
        received.update(ranks=ranks, me=mine["world"]["process"])
        (folder / "part").write_text(json.dumps(received))
        os.replace(folder / "part", folder / "all")
        faulthandler.dump_traceback_later(2 * seconds + 30, exit=True)

    faulthandler.dump_traceback_later(seconds + 10, exit=True)
    together.examine(mine, seconds, store)
    received["done"] = True
    store(received["ranks"])
    faulthandler.cancel_dump_traceback_later()


def _table(ranks: Sequence[facts.Facts], found: Sequence[tuple[str, Finding]]) -> str:
    """Return the report as text: a line per finding, and a line with its remedy."""
    first = ranks[0]
    process, world = first.get("process", {}), first.get("world")
    size = world["processes"] if world else process.get("size")
    where = (
        f"{size} process{'es' if size != 1 else ''}, {world['replicas']} replicas"
        if world
        else (f"process {process.get('rank')} of {size}, not connected")
    )
    lines = [f"keras_shardopt doctor: {where}, {process.get('framework')}"]
    for name, finding in found:
        lines.append(f"{finding.level:8} {name:13} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':22} -> {finding.remedy}")
    counts = {level: sum(finding.level == level for _, finding in found) for level in (ERROR, WARNING, OK)}
    return "\n".join([*lines, ", ".join(f"{level}: {count}" for level, count in counts.items())])


def _as_json(ranks: Sequence[facts.Facts], found: Sequence[tuple[str, Finding]]) -> str:
    rows = [{"check": name, **finding._asdict()} for name, finding in found]
    return json.dumps({"findings": rows, "processes": list(ranks)}, indent=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keras_shardopt.doctor",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Examines the machines, settings and network of a job. Start it as your program, in all processes.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--directory", default=".", help="a directory for checkpoints, to examine (default: this one)")
    parser.add_argument("--json", action="store_true", help="print findings and all facts as JSON")
    parser.add_argument(
        "--timeout", type=_seconds, default=60, metavar="S", help="seconds to wait for others (default: 60)"
    )
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    """Return `text` as a number. Raise an error unless it is finite and above 0."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"give a finite number of seconds above 0, and not {text}")
    return seconds


_EXAMPLES = """examples:
  python -m keras_shardopt.doctor
  python -m keras_shardopt.launch --nproc 2 -m keras_shardopt.doctor --directory checkpoints
  torchrun --nproc-per-node 2 -m keras_shardopt.doctor
  srun python -m keras_shardopt.doctor

The exit status is 1 if there are errors, and 0 otherwise. Each process reports for itself if they cannot connect."""


if __name__ == "__main__":
    sys.exit(main())
