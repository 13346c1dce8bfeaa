"""Records which test executes which lines of the package, in a test's process and in all that it starts.

Tools like coverage.py cost too much here: they follow every line of the frameworks. `sys.monitoring` (Python 3.12)
switches each of those lines off after its first use. `mutate.py record` sets the two variables below, and lets every
process import this file. PYTEST_DONT_REWRITE, because it is imported before pytest.
"""

import atexit
import collections
import json
import os
import pathlib
import sys

PACKAGE = os.environ["PACKAGE_TO_RECORD"] + os.sep
FOLDER = pathlib.Path(os.environ["RECORD_LINES_TO"])


class Recorder:
    """Appends a JSON list to a file of this process for each test: the test's id, and line numbers by file."""

    def __init__(self):
        self._test = None
        self._lines = set()
        sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "lines of the package")
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, self._line)
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)
        atexit.register(self.save)
        os.register_at_fork(after_in_child=self._forget)
        exit_at_once = os._exit

        def _exit(status):
            self.save()
            exit_at_once(status)

        os._exit = _exit  # which forks end with

    def begin(self, test):
        self.save()
        self._test = test

    def save(self):
        by_file = collections.defaultdict(list)
        while self._lines:
            file, line = self._lines.pop()
            by_file[file].append(line)
        if by_file:
            # A process that a test has started knows that test from its environment.
            test = self._test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0].partition("@")[0]
            with open(FOLDER / f"{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps([test, by_file]) + "\n")

    def _line(self, code, line):
        if not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        self._lines.add((code.co_filename.removeprefix(PACKAGE), line))

    def _forget(self):
        self._test = None
        self._lines.clear()


recorder = Recorder()


def pytest_runtest_logstart(nodeid):
    recorder.begin(nodeid.partition("@")[0])


def pytest_sessionfinish():
    recorder.save()
