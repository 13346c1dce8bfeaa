"""Checks that several processes make together, all of them in one spawn.

A file for workers marks its checks with `check` and ends with `main`; a file of tests finds their names without
importing it, and runs them with `passed_and_failures`.
"""

import ast
import json
import pathlib
import sys
import time

from support import launch

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def make(scope, names, after_each):
    """Makes the checks with these names, one after another; `after_each` lets the processes wait for each other."""
    for name in names:
        start = time.perf_counter()
        try:
            CHECKS[name](scope)
        except BaseException:
            print(f"rank {scope.replica_id} failed in the check {name!r}", flush=True)
            raise
        after_each()
        if scope.is_chief:
            print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)


def main(data_parallel, after_each):
    """What a worker does. Arguments: the file to which rank 0 writes the names that passed, and the names to run."""
    file, *names = sys.argv[1:]
    with data_parallel(prepare=False) as scope:
        make(scope, names, after_each)
    if scope.is_chief:
        pathlib.Path(file).write_text(json.dumps(names))
    scope.close()


def refused(function, error, words):
    try:
        function()
    except error as caught:
        assert words in str(caught), str(caught)
    else:
        raise AssertionError(f"not refused: {words}")


class NullStore(dict):
    """A store for processes that take part in saving, and keep nothing."""

    def __setitem__(self, key, value):
        pass


def names_in(source):
    """The names of the checks in a file, which is read and not imported: it is for workers."""
    return [
        node.name
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
    ]


def passed_and_failures(source, num_ranks, file, names, timeout_alone):
    """The names of the checks that passed on so many ranks, and what the workers printed in the others."""
    try:
        launch.torchrun(source.name, num_ranks, file, *names, timeout=360)
    except launch.WorkersFailed as together:
        # One check takes the others down with it; so each alone, to say which.
        passed, failures = [], {}
        for name in names:
            try:
                launch.torchrun(source.name, num_ranks, file, name, timeout=timeout_alone)
                passed.append(name)
            except launch.WorkersFailed as failure:
                failures[name] = str(failure)
        if not failures:
            return [], dict.fromkeys(names, f"each check passes alone, and one fails after others: {together}")
        return passed, failures
    return json.loads(file.read_text()), {}


class Runs:
    """The checks of a file for workers on so many ranks, in one spawn; `others`, not run by default, in another."""

    def __init__(self, source, num_ranks, folder, others=(), timeout_alone=60):
        self._source, self._num_ranks, self._folder, self._others = source, num_ranks, folder, others
        self._timeout_alone = timeout_alone
        self._outcomes = {}

    def verify(self, name):
        """That the check with this name has passed; if not, with what the workers printed."""
        key = name in self._others
        if key not in self._outcomes:
            names = [each for each in names_in(self._source) if (each in self._others) == key]
            file = self._folder / f"{self._num_ranks}-{key}.json"
            self._outcomes[key] = passed_and_failures(self._source, self._num_ranks, file, names, self._timeout_alone)
        passed, failures = self._outcomes[key]
        assert name in passed, failures.get(name)
