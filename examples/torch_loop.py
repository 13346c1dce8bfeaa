"""From a custom DDP loop to CrossShard: both loops, and a comparison of their weights.

    torchrun --nproc-per-node 2 examples/torch_loop.py

`with_ddp` is a loop with `DistributedDataParallel` and `torch.optim`. `with_cross_shard` is
the same training of a Keras model. Both clip the gradient of the whole batch. Prints the
largest difference between the weights, relative to the distance that they moved.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits

import keras_shardopt as ks

BATCH_SIZE = 64


def with_ddp(start, batches):
    layers = [torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)]
    module = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter, array in zip(module.parameters(), start):
            parameter.copy_(
                torch.from_numpy(array.T)
            )  # PyTorch's kernels are (outputs, inputs)
    model = module
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for x, y in batches:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().numpy().T for parameter in module.parameters()]


def with_cross_shard(model, batches):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = ks.CrossShard(
        ks.GradientClipping(keras.optimizers.SGD(0.2, momentum=0.9), 1.0)
    )
    variables = model.trainable_variables
    optimizer.build(variables)
    for x, y in batches:
        loss = loss_fn(y, model(x, training=True))
        model.zero_grad()
        loss.backward()
        optimizer.apply([v.value.grad for v in variables], variables)
    return model.get_weights()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="number of updates")
    arguments = parser.parse_args()

    with (
        ks.data_parallel() as replicas
    ):  # opens the process group, and gives all ranks the same seed
        layers = [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        start = model.get_weights()
        images, labels = load_digits(return_X_y=True)
        rows = np.arange(arguments.steps * BATCH_SIZE) % len(images)
        x, y = ks.shard_data(
            (images[rows] / 16).astype("float32"), labels[rows].astype("int64")
        )
        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        batches = torch.utils.data.DataLoader(data, BATCH_SIZE // replicas.num_processes)
        old = with_ddp(start, batches)
        new = with_cross_shard(model, batches)
        movement = max(np.max(np.abs(o - s)) for o, s in zip(old, start))
        difference = max(np.max(np.abs(o - n)) for o, n in zip(old, new))
        if replicas.is_chief:
            print(f"replicas                   {replicas.num_replicas}")
            print(f"relative difference        {difference / movement:.1e}")


if __name__ == "__main__":
    main()
