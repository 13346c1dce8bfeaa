"""`python -m keras_shardopt.compile_for h100:8 train.py`: compiles a program's training step for other hardware."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.compile_for import report, targets

# For each backend, the module that exports and compiles the step.
_COMPILERS = {"jax": "keras_shardopt.compile_for.jax.step"}

_EPILOG = """examples:
  python -m keras_shardopt.compile_for h100:8 train.py --epochs 1
  python -m keras_shardopt.compile_for --json tpu:v5e:2x4 train.py
  python -m keras_shardopt.compile_for --plot scale.png h100:8,h100:64,h100:512 train.py    (prints a table, and plots)

The program runs up to its first training step, on the CPU, with the target's number of (virtual) CPU devices.
Nothing runs on the target: memory and collectives are the compiler's figures, and the times are lower bounds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the step and prints the report. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    names = given.target.split(",")
    try:
        wanted = [targets.parse(name) for name in names]
        if not given.program:
            raise ValueError("A program is missing after the target. Use for example `h100:8 train.py`.")
        if given.plot and (len(wanted) < 2 or importlib.util.find_spec("matplotlib") is None):
            raise ValueError(
                f"`--plot` needs several targets and matplotlib. Received: {len(wanted)} "
                f"target{'s' * (len(wanted) > 1)}. Separate targets by commas, and run `pip install matplotlib`."
            )
        if len(wanted) > 1:
            everything = [_in_a_process(name, given.program) for name in names]
            print(json.dumps(everything, indent=1) if given.json else report.scale_table(everything))
            if given.plot:
                report.plot(everything, given.plot)
            return 0
        compiled = _compiled(wanted[0], given.program)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if given.hlo:
        with open(given.hlo, "w") as file:
            file.write(compiled.text)
    print(json.dumps(compiled.as_dict(), indent=1) if given.json else report.table(compiled))
    return 0


def _compiled(target: targets.Target, program: Sequence[str]) -> report.Compiled:
    compiler = for_backend(_COMPILERS)
    if compiler is None:
        raise ValueError("Compiling for devices of another machine is possible only on JAX. Set KERAS_BACKEND=jax.")
    missing = compiler.missing_packages(target)
    if missing:
        raise ValueError(f"The compiler for {target.name} is not installed. Run `pip install {' '.join(missing)}`.")
    compiler.use_cpu_devices(target.num_devices)
    step = compiler.first_step(_running(program), target)
    if step is None:
        raise ValueError(
            f"{program[0]} must run a compiled training step, but ran no such step. Call `model.fit` or "
            "`train_on_batch`, without `run_eagerly` or `jit_compile=False`."
        )
    compiled: report.Compiled = compiler.compiled(step, target)
    return compiled


def _running(program: Sequence[str]) -> Callable[[], Any]:
    def run() -> None:
        sys.argv = list(program)
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        try:
            runpy.run_path(program[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise ValueError(
                    f"{program[0]} ended before its first step. Received: exit status {end.code}."
                ) from end
        except ValueError as error:  # `main` would hide the traceback of a ValueError
            raise RuntimeError(f"{program[0]} failed before its first step.") from error

    return run


def _in_a_process(name: str, program: Sequence[str]) -> dict[str, Any]:
    """Returns the figures for one target, from a new process, because the number of devices is fixed per process."""
    command = [sys.executable, "-m", "keras_shardopt.compile_for", "--json", name, *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{name} failed with exit status {done.returncode}.")
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keras_shardopt.compile_for",
        allow_abbrev=False,
        description="Compiles the training step of a program for a TPU or GPU that this machine does not have.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="device:number or device:shape, as h100:8 or tpu:v5e:2x4; several with commas")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--plot", metavar="FILE", help="plot predicted times of several targets by number of devices")
    parser.add_argument("--hlo", metavar="FILE", help="write the compiled program (HLO text) to this file")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="train.py ...", help="the program and its arguments"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
