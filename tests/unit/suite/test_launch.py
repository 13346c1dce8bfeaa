"""The launcher of tests with several processes: every worker's traceback, and a limit that holds."""

import os
import time

import pytest
from conftest import BACKEND
from support import launch
from support.launch import patient

PROGRAM = """
import os, sys, time
print("worker", os.environ["WORKER"], "says", sys.argv[1], flush=True)
if os.environ["WORKER"] in sys.argv[2]:
    raise ValueError("wrong on " + os.environ["WORKER"])
if os.environ["WORKER"] in sys.argv[3]:
    time.sleep(60)
"""


# Most processes of the tests are forks of one that has imported the framework.
each_start = pytest.mark.parametrize(
    "start", [None, pytest.param(launch.fork_with("torch"), marks=pytest.mark.backends("torch"))], ids=["new", "forked"]
)


def run(folder, start, fail="", hang="", **limits):
    script = folder / "worker.py"
    script.write_text(PROGRAM)
    environments = [{**os.environ, "WORKER": str(i), "PYTHONFAULTHANDLER": "1"} for i in range(3)]
    return launch.workers(script, environments, "hello", fail, hang, start=start, **limits)


@pytest.mark.neutral
@each_start
def test_what_each_worker_printed(tmp_path, start):
    assert run(tmp_path, start) == [f"worker {i} says hello\n" for i in range(3)]


@pytest.mark.neutral
@each_start
def test_the_traceback_of_every_worker_that_fails(tmp_path, start):
    with pytest.raises(launch.WorkersFailed) as caught:
        run(tmp_path, start, fail="02")
    message = str(caught.value)
    assert "ValueError: wrong on 0" in message and "ValueError: wrong on 2" in message
    assert "worker 1, exit status 0\nworker 1 says hello" in message


@pytest.mark.neutral
@each_start
@pytest.mark.parametrize(("fail", "limits"), [("0", {"grace": 1.0}), ("", {"timeout": 4.0})])
def test_a_worker_that_waits_for_ever_says_where_and_is_killed(tmp_path, start, fail, limits):
    begin = time.monotonic()
    with pytest.raises(launch.WorkersFailed) as caught:
        run(tmp_path, start, fail=fail, hang="12", **limits)
    assert time.monotonic() - begin < patient(40)
    message = str(caught.value)
    assert ("ValueError: wrong on 0" if fail else "not finished after 4.0 s: [1, 2]") in message
    for worker in (1, 2):
        killed = message.partition(f"--- worker {worker}")[2].partition("--- worker")[0]
        assert killed.startswith(", exit status -6, killed") and 'worker.py", line 7' in killed


STATE = """
import os, random
import numpy as np
print(os.environ["WORKER"], random.random(), np.random.random())
print(os.environ.get("KERAS_BACKEND"), os.getpgid(0) == os.getpid())
"""


@pytest.mark.neutral
@each_start
def test_workers_share_no_random_state_and_no_variables(tmp_path, start):
    script = tmp_path / "state.py"
    script.write_text(STATE)
    environments = [{"PATH": os.environ["PATH"], "WORKER": str(i)} for i in range(2)]
    first, second = (printed.split() for printed in launch.workers(script, environments, start=start))
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] != second[1] and first[2] != second[2]
    assert first[3:] == second[3:] == ["None", "True"]


@pytest.mark.neutral
@each_start
def test_what_is_left_to_the_end_is_done_after_the_traceback(tmp_path, start):
    script = tmp_path / "end.py"
    script.write_text("import atexit\natexit.register(print, 'the end')\nraise ValueError('wrong')")
    with pytest.raises(launch.WorkersFailed, match=r"exit status 1\n[^$]*ValueError: wrong\nthe end\n"):
        launch.workers(script, [dict(os.environ)], start=start)


@pytest.mark.xdist_group("processes")
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="this system does not list threads")
@pytest.mark.exhaustive("torch")
def test_what_others_are_forked_from_has_no_thread_that_they_would_lack():
    text = "import os\nprint(len(os.listdir(f'/proc/{os.getppid()}/task')))"
    assert launch.program(BACKEND, text, environment=launch.variables(BACKEND)) == "1\n"
