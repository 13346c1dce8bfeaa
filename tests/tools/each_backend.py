"""Runs the default tests on every backend, in an environment that has all three frameworks.

    python tests/tools/each_backend.py [arguments of pytest]

Three runs at a time, so that two cores have work while tests wait for their ranks; each prints when it is over. What
fails on one backend does not keep the others from running. In the end it says how long each took.
"""

import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time

# Every backend's own, and what runs processes of all of them by itself. What takes longest comes first.
RUNS = {"tensorflow": [], "torch": [], "jax": [], "together": ["tests/promises/together"]}
AT_A_TIME = 3


def run(name):
    """The output of a run, the minutes that it took, and its exit status."""
    folders = RUNS[name]
    print(f"{name} ...", flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", *folders, *sys.argv[1:]]
    environment = {**os.environ, "KERAS_BACKEND": "jax" if folders else name, "RUN_NAME": name}
    with tempfile.TemporaryFile("w+") as output:
        status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        return output.read(), (time.monotonic() - begin) / 60, status


def main():
    begin = time.monotonic()
    results = []
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        runs = {pool.submit(run, name): name for name in RUNS}
        for done in concurrent.futures.as_completed(runs):
            output, minutes, status = done.result()
            print(f"\n{'=' * 30} {runs[done]} {'=' * 30}\n{output}", flush=True)
            results.append((runs[done], minutes, status))
    for name, minutes, status in results:
        print(f"{name:12} {minutes:5.1f} min  {'passed' if status == 0 else f'FAILED, exit status {status}'}")
    print(f"{'in all':12} {(time.monotonic() - begin) / 60:5.1f} min")
    sys.exit(any(status for _, _, status in results))


main()
