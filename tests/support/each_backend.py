"""Runs the default tests on one backend after the other, in an environment that has all three frameworks.

    python tests/support/each_backend.py [arguments of pytest]

What fails on one backend does not keep the others from running. In the end it says how long each took.
"""

import os
import subprocess
import sys
import time

# Every backend's own, then what runs processes of all of them by itself.
RUNS = {"torch": [], "jax": [], "tensorflow": [], "together": ["tests/exchange", "tests/examples"]}


def main():
    results = []
    for name, folders in RUNS.items():
        print(f"\n{'=' * 30} {name} {'=' * 30}", flush=True)
        begin = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "loadgroup",
            *folders,
            *sys.argv[1:],
        ]
        environment = {**os.environ, "KERAS_BACKEND": "jax" if folders else name, "RUN_NAME": name}
        status = subprocess.run(command, env=environment).returncode
        results.append((name, (time.monotonic() - begin) / 60, status))
    print()
    for name, minutes, status in results:
        print(f"{name:12} {minutes:5.1f} min  {'passed' if status == 0 else f'FAILED, exit status {status}'}")
    sys.exit(any(status for _, _, status in results))


main()
