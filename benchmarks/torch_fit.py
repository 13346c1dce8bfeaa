"""What a step of `fit` costs on two ranks, against a custom training loop with `DistributedDataParallel`, on PyTorch.

    torchrun --nproc-per-node 2 benchmarks/torch_fit.py [--write]

Six layers `Dense(1024)`, 64 rows on each rank, Adam. Targets: `fit` with `CrossShard(Adam())` within 0.9 times the loop
with `torch.optim.Adam`, and within 1.02 times the loop with `Adam(fused=True)`.
With Keras 3.16 or later, `fit` of Keras' own Adam, for which it makes a DDP by itself, is one more peer: install
`keras-nightly --no-deps` over Keras. `--quick` runs in seconds, on sizes that say nothing.
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
    arguments.add_argument("--mib", type=float, nargs="*", default=[], help="further sizes of buckets to measure")
    given = arguments.parse_args()
    with ks.data_parallel(prepare=False) as replicas:
        training = Training(given, replicas)
        peers = {}  # before models are prepared, which keeps Keras from making a DDP
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
