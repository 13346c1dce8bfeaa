"""Trains cases of `problems/same_bits.py` on ranks of PyTorch.

Arguments: the file for what rank 0 finds, and cases; or a folder, a case and the step in which to stop, or -1. The
variable `THREADS_OF_RANKS` says with how many threads each rank begins, `NUM_PARTS` and `BATCH_SIZE` what else they say
than the problems do.
"""

import json
import os
import pathlib
import sys
import warnings

import torch
from promises.problems import same_bits

import keras_shardopt as ks
from keras_shardopt.backends.torch import process_group

warnings.filterwarnings("ignore")
if "THREADS_OF_RANKS" in os.environ:
    torch.set_num_threads(int(os.environ["THREADS_OF_RANKS"].split(",")[int(os.environ["RANK"])]))

for name in {"NUM_PARTS", "BATCH_SIZE"} & os.environ.keys():
    setattr(same_bits, name, int(os.environ[name]))


def main():
    file, *cases = sys.argv[1:]
    found = {}
    for case in cases:
        with ks.data_parallel(timeout=60) as replicas:
            found[case] = same_bits.trained(replicas, case)
        assert process_group._open is None or process_group._open.num_due == 0  # each step that was announced has ended
        replicas.close()
    if replicas.is_chief:
        pathlib.Path(file).write_text(json.dumps(found))


def restart():
    folder, case, step = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with ks.data_parallel(timeout=60) as replicas:
        found = same_bits.restarted(case, folder, step)
    replicas.close()
    if replicas.is_chief and found is not None:
        (folder / "found.json").write_text(json.dumps(found))


restart() if sys.argv[-1].lstrip("-").isdigit() else main()
