"""Cost of a step of `fit` on two ranks of PyTorch, relative to a custom training loop with `DistributedDataParallel`.

    torchrun --nproc-per-node 2 benchmarks/torch_fit.py [--write]

Six layers `Dense(1024)`, 64 rows per rank, Adam. Targets: `fit` with `CrossShard(Adam())` takes at most 0.9 times the
loop with `torch.optim.Adam`, and at most 1.02 times the loop with `Adam(fused=True)`.
Keras 3.16 and later create a DDP in `fit` of Keras' own Adam: another measurement. To get it, install
`keras-nightly --no-deps` over Keras. `--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import timing
import torch
from torch_training import RATE, Training, parser

import keras_shardopt as ks


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=float, nargs="*", default=[], help="further bucket sizes to measure, in MiB")
    given = arguments.parse_args()
    with ks.data_parallel(prepare=False) as replicas:
        training = Training(given, replicas)
        peers = {}  # before models are prepared: `prepare` keeps Keras from creating a DDP
        if hasattr(keras.Model, "_initialize_ddp"):
            peers["Keras' own DDP with Adam"] = training.fit(keras.optimizers.Adam(RATE))
    with ks.data_parallel(auto_shard=False):

        def fit(**more: object) -> object:
            return training.fit(ks.CrossShard(keras.optimizers.Adam(RATE), **more))

        plain, fused = "DDP + torch.optim.Adam", "DDP + torch.optim.Adam(fused=True)"
        runs = {
            plain: training.by_hand(lambda parameters: torch.optim.Adam(parameters, RATE)),
            fused: training.by_hand(lambda parameters: torch.optim.Adam(parameters, RATE, fused=True)),
            **peers,
            "fit, CrossShard(Adam)": fit(),
            "fit, CrossShard(Adam, shard_state=True)": fit(shard_state=True),
            "fit, CrossShard(Adam, overlap=False)": fit(overlap=False),
            "fit, CrossShard(Adam, fused=False)": fit(fused=False),
            "fit, CrossShard(Adam, overlap=False, fused=False)": fit(overlap=False, fused=False),
            **{f"fit, CrossShard(Adam, bucket_mib={mib:g})": fit(bucket_mib=mib) for mib in given.mib},
        }
        seconds = training.seconds(runs)
        title = "A step of fit" + (", next to Keras' own DDP," if peers else "")
        training.report(title, "torch_fit.py", timing.table(seconds, [plain, fused], given.steps))
    replicas.close()


if __name__ == "__main__":
    main()
