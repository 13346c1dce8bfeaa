"""Checks that several processes make together, all of them in one spawn.

A file for workers marks its checks with `check` and ends with `main`; a file of tests finds their names without
importing it, and runs them with `Runs`.
"""

import ast
import json
import pathlib
import sys
import time

from support import launch

CHECKS = {}
ALONE = 90
"""Seconds for one check."""


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


def failures(source, num_ranks, file, names):
    """Which of these checks fail on so many ranks, each with what the workers printed."""
    try:
        launch.torchrun(source.name, num_ranks, file, *names, timeout=360 if len(names) > 1 else ALONE)
    except launch.WorkersFailed as together:
        if len(names) == 1:
            return {names[0]: str(together)}
        # One check takes the others down with it; so each alone, to say which.
        found = {}
        for name in names:
            found |= failures(source, num_ranks, file, [name])
        return found or dict.fromkeys(names, f"each check passes alone, and one fails after others: {together}")
    assert json.loads(file.read_text()) == names
    return {}


def selected(request):
    """The parameters of each test in the file of `request` that this session runs."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


class Runs:
    """The checks of a file for workers, those on one number of ranks in one spawn.

    Only checks run that this session has tests of: their parameters are `name`, and `num_ranks` if there are several.
    """

    def __init__(self, request, source, folder, num_ranks=None):
        self._source, self._folder, self._num_ranks = source, folder, num_ranks
        self._asked = {(params.get("num_ranks", num_ranks), params.get("name")) for params in selected(request)}
        self._outcomes = {}

    def verify(self, name, num_ranks=None):
        """That the check with this name has passed; if not, with what the workers printed."""
        num_ranks = num_ranks or self._num_ranks
        if (num_ranks, name) not in self._outcomes:
            self._asked.add((num_ranks, name))
            here = [(num_ranks, each) for each in names_in(self._source)]
            names = [each for _, each in here if (num_ranks, each) in self._asked - self._outcomes.keys()]
            failed = failures(self._source, num_ranks, self._folder / f"{num_ranks}.json", names)
            self._outcomes |= {(num_ranks, each): failed.get(each) for each in names}
        failure = self._outcomes[num_ranks, name]
        if failure is not None:
            raise AssertionError(failure)
