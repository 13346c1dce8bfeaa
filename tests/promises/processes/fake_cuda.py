"""Rank 0 of some on a GPU, none of which exist: what a `fit` makes the host wait for, in each mode.

python fake_cuda.py GUARD.so RESULT.json RANKS

PyTorch's fake tensors have a device and no values. GUARD.so (fake_cuda.cpp) lets PyTorch's autograd take them for those
of a GPU. Messages between ranks travel on the host, so they and the data are real. A number that the program reads from
the GPU is recorded, and is 1, True, or a count of 0.
"""

import collections
import ctypes
import json
import sys
import traceback

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before PyTorch asks for the hooks

import keras
import numpy as np
import torch
import torch.distributed as dist
from fake_ranks import MODES
from keras.src.callbacks.callback_list import CallbackList
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import keras_shardopt as ks
from keras_shardopt.backends.torch import process_group, processes
from keras_shardopt.fit.torch import batches, equal_start, shared_batches

NUM_RANKS, WARM_UP, NUM_STEPS = int(sys.argv[3]), 3, 4


def unchanged(grads, variables):
    return grads


def reading(grads, variables):
    return [grad * float(keras.ops.convert_to_numpy(grad[..., 0]).sum()) for grad in grads]


def mixing(grads, variables):
    return [grad + torch.ones(tuple(grad.shape), device="cpu") for grad in grads]


WRAPPERS = {
    "fused=False": lambda inner: ks.CrossShard(inner, fused=False),
    "LossScaling": lambda inner: ks.CrossShard(ks.LossScaling(inner)),
    "GradientClipping": lambda inner: ks.CrossShard(ks.GradientClipping(inner, 1.0)),
    "virtual_replicas": lambda inner: ks.CrossShard(inner, virtual_replicas=2 * NUM_RANKS),
    "replica_transform": lambda inner: ks.CrossShard(inner, replica_transform=unchanged),
    "fault: reads a number": lambda inner: ks.CrossShard(inner, replica_transform=reading),
    "fault: mixes devices": lambda inner: ks.CrossShard(inner, replica_transform=mixing),
    "MixedPrecision": lambda inner: ks.CrossShard(ks.MixedPrecision(inner)),
}
ALL = {
    "Keras": lambda inner: inner,
    **{name: (lambda inner, options=options: ks.CrossShard(inner, **options)) for name, options in MODES.items()},
    **WRAPPERS,
}


def on_host(function):
    """The function outside of fake tensors, and what it returns if that is a function."""

    def call(*args, **kwargs):
        with unset_fake_temporarily(), _disable_current_modes():
            result = function(*args, **kwargs)
        return on_host(result) if callable(result) else result

    return call


def zeros(tensor, **_):
    """Stands in for `numpy` of fake tensors."""
    if tensor.device.type != "cpu":
        raise TypeError("first copy it to the host")
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).partition(".")[2])


class Recorder(TorchDispatchMode):
    """What happens between `start` and the end of it."""

    def __init__(self):
        super().__init__()
        self.is_on = False
        self.waits = collections.Counter()
        self.copies = collections.Counter()
        self.operators = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        devices = kinds((args, kwargs))
        if "cuda" in devices:
            self.operators.add(f"{name}.{function._overloadname}".removesuffix(".default"))
        if name == "aten::_local_scalar_dense":
            if "cuda" in devices:
                self.note(self.waits)
            value = args[0]
            return True if value.dtype == torch.bool else 1.0 if value.is_floating_point() else 0
        if name == "aten::equal":
            self.note(self.waits)
            return True
        if name.startswith("aten::_fused_"):  # the fake kernels of PyTorch stop (`stops_in_fused`)
            assert devices == {"cuda"}, (name, devices)
            return None
        result = function(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            source, target = args[-1 if name == "aten::_to_copy" else 1], result
            way = (source.device.type, target.device.type)
            if way == ("cuda", "cpu"):
                self.note(self.waits)
            blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
            if way == ("cpu", "cuda") and blocks:
                self.note(self.copies)
        return result

    def note(self, where):
        if self.is_on:
            stack = traceback.extract_stack()[:-2]
            own = [frame for frame in stack if "keras_shardopt" in frame.filename] or stack
            where[f"{own[-1].filename.rpartition('keras_shardopt/')[2]} {own[-1].name}"] += 1


def kinds(nest):
    return {leaf.device.type for leaf in torch.utils._pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)}


class Starting(keras.callbacks.Callback):
    """Records some steps in the middle, once ranks have agreed."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def on_train_batch_begin(self, batch, logs=None):
        self.recorder.is_on = WARM_UP <= batch < WARM_UP + NUM_STEPS


def move(variables):
    """Gives the variables fake values on the GPU."""
    for variable in variables:
        old = variable.value
        new = torch.empty(tuple(old.shape), dtype=old.dtype, device="cuda")
        variable._value = torch.nn.Parameter(new, requires_grad=old.requires_grad)


def recorded(around):
    keras.src.backend.torch.core.DEFAULT_DEVICE = "cpu"
    keras.utils.set_random_seed(0)
    with ks.data_parallel(prepare=around is not ALL["Keras"]):
        model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(3))])
        model.compile(around(keras.optimizers.Adam()), "mse")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.metrics_variables, *optimizer.variables]
    variables += optimizer._written() if isinstance(optimizer, ks.CrossShard) else []
    x = np.ones((2 * NUM_RANKS * (WARM_UP + NUM_STEPS + 1), 64), "float32")
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        keras.src.backend.torch.core.DEFAULT_DEVICE = "cuda"
        move({id(variable): variable for variable in variables}.values())
        model.fit(x, x, batch_size=2 * NUM_RANKS, verbose=0, callbacks=[Starting(recorder)])
        devices = kinds([variable.value for variable in variables])
    return {
        "waits": recorder.waits,
        "copies": recorder.copies,
        "operators": sorted(recorder.operators),
        "devices": sorted(devices),
    }


def stops_in_fused():
    """How PyTorch's own fake kernel of the fused Adam ends; None if it works."""
    with FakeTensorMode():
        lists = [[torch.empty(8, device="cuda")] for _ in range(4)]
        step, rate = (torch.empty((), device="cuda") for _ in range(2))
        try:
            options = {"weight_decay": 0, "eps": 1e-7, "amsgrad": False, "maximize": False}
            torch._fused_adam_(*lists, [], [step], lr=rate, beta1=0.9, beta2=0.9, **options)
        except Exception as error:
            return type(error).__name__


def main(result):
    # Fake tensors are for one thread. In another one autograd works, and Keras reads logs that no callback wants here.
    torch.autograd.set_multithreading_enabled(False)
    CallbackList._async_dispatch = lambda self, function, *args: None
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    process_group._announce = on_host(process_group._announce)
    for module in (equal_start, process_group, processes):
        module.gather_objects = on_host(process_group.gather_objects)
    batches.EpochIterator._pull = on_host(batches.EpochIterator._pull)
    shared = shared_batches.SharedBatches
    shared.next_part = on_host(shared.next_part)
    FakeTensor.numpy = zeros
    found = {}
    for name, around in ALL.items():
        try:
            found[name] = recorded(around)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    found["stops in fused"] = stops_in_fused()
    with open(result, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[2])
