"""The time of an update with compressed gradients, on ranks of PyTorch, with a simulated slow network.

    KERAS_BACKEND=torch torchrun --nproc-per-node 4 benchmarks/fewer_bytes_link.py --mbit 0 100

Only the update: 4 layers of 1024 x 256 weights, precomputed gradients, SGD with momentum. A slow network is a pause
before each collective, long enough to send a replica's bytes (from `communication_report`) at this rate in Mbit/s; 0 is
no pause. Rank 0 prints the medians.
"""

import argparse
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import keras_shardopt as ks
from keras_shardopt.backends.torch import communicator
from keras_shardopt.backends.traffic import Collective

SCHEMES = {
    "none": None,
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "powersgd": ks.compression.PowerSGD(rank=4, warmup_steps=0),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mbit",
        type=float,
        nargs="*",
        default=[0, 100],
        help="rates of the simulated network in Mbit/s; 0 is no pause",
    )
    parser.add_argument("--updates", type=int, default=7, help="number of measured updates")
    arguments = parser.parse_args()
    real = communicator.note
    torch.set_num_threads(1)
    with ks.data_parallel() as replicas:
        for mbit in arguments.mbit:

            def slow(kind, tensors, num_replicas, mbit=mbit):
                real(kind, tensors, num_replicas)
                num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                if mbit:
                    time.sleep(8 * Collective(kind, (), num_bytes, num_replicas).bytes_sent / (mbit * 1e6))

            communicator.note = slow
            for name, scheme in SCHEMES.items():
                weights = [keras.Variable(torch.zeros(1024, 256)) for _ in range(4)]
                grads = [torch.randn(1024, 256) for _ in weights]
                sgd = keras.optimizers.SGD(0.1, momentum=0.9)
                optimizer = ks.CrossShard(sgd, compression=scheme, overlap=False)
                times = []
                for _ in range(arguments.updates + 2):
                    torch.distributed.barrier()
                    start = time.perf_counter()
                    with torch.no_grad():
                        optimizer.apply(grads, weights)
                    torch.distributed.barrier()
                    times.append(1e3 * (time.perf_counter() - start))
                if replicas.is_chief:
                    report = optimizer.communication_report()
                    median = statistics.median(times[2:])
                    link = f"{mbit:g} Mbit/s" if mbit else "no pause"
                    print(f"{link:>11} {name:>9} {median:8.1f} ms {report.bytes_per_update / 1e6:7.3f} MB", flush=True)


if __name__ == "__main__":
    main()
