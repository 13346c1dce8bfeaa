"""The launcher of tests with several processes: every worker's traceback, and a limit that holds."""

import os
import time

import pytest
from support import launch

PROGRAM = """
import os, sys, time
print("worker", os.environ["WORKER"], "says", sys.argv[1], flush=True)
if os.environ["WORKER"] in sys.argv[2]:
    raise ValueError("wrong on " + os.environ["WORKER"])
if os.environ["WORKER"] in sys.argv[3]:
    time.sleep(60)
"""


def run(folder, fail="", hang="", **limits):
    script = folder / "worker.py"
    script.write_text(PROGRAM)
    environments = [{**os.environ, "WORKER": str(i), "PYTHONFAULTHANDLER": "1"} for i in range(3)]
    return launch.workers(script, environments, "hello", fail, hang, **limits)


def test_what_each_worker_printed(tmp_path):
    assert run(tmp_path) == [f"worker {i} says hello\n" for i in range(3)]


def test_the_traceback_of_every_worker_that_fails(tmp_path):
    with pytest.raises(launch.WorkersFailed) as caught:
        run(tmp_path, fail="02")
    message = str(caught.value)
    assert "ValueError: wrong on 0" in message and "ValueError: wrong on 2" in message
    assert "worker 1, exit status 0\nworker 1 says hello" in message


@pytest.mark.parametrize(("fail", "limits"), [("0", {"grace": 1.0}), ("", {"timeout": 4.0})])
def test_a_worker_that_waits_for_ever_says_where_and_is_killed(tmp_path, fail, limits):
    start = time.monotonic()
    with pytest.raises(launch.WorkersFailed) as caught:
        run(tmp_path, fail=fail, hang="12", **limits)
    assert time.monotonic() - start < 40
    message = str(caught.value)
    assert ("ValueError: wrong on 0" if fail else "not finished after 4.0 s: [1, 2]") in message
    for worker in (1, 2):
        killed = message.partition(f"--- worker {worker}")[2].partition("--- worker")[0]
        assert killed.startswith(", exit status -6, killed") and 'worker.py", line 7' in killed
