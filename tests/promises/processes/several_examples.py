"""Runs several examples in one process, or in the processes that torchrun started.

Arguments: lists of a file and its arguments, with `--` between them.
"""

import itertools
import os
import runpy
import sys

commands = [list(group) for is_end, group in itertools.groupby(sys.argv[1:], lambda word: word == "--") if not is_end]
for sys.argv in commands:
    if os.environ.get("RANK", "0") == "0":
        print(f"--- {sys.argv[0].rpartition('/')[2]}", flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")
