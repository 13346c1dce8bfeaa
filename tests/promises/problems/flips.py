"""Changes one replica's copy of a variable, behind the back of everything."""

from __future__ import annotations

import keras
import numpy as np

BACKEND = keras.config.backend()


def copy_of(variable, replica=0):
    """That replica's copy as an array. On PyTorch each rank has its own only."""
    if BACKEND == "tensorflow":
        return np.array(variable.value.values[replica])
    if BACKEND == "jax":
        return np.array(variable.value.addressable_shards[replica].data)
    return np.array(_bits_of_torch(variable.value))


def change(variable, replica, function):
    """Lets `function` change an array of that replica's copy in place. On PyTorch, call it on that rank only."""
    array = copy_of(variable, replica)
    function(array)
    if BACKEND == "tensorflow":
        variable.value.values[replica].assign(array)
    elif BACKEND == "jax":
        import jax

        copies = [shard.data for shard in variable.value.addressable_shards]
        copies[replica] = jax.device_put(array, copies[replica].device)
        whole = jax.make_array_from_single_device_arrays(array.shape, variable.value.sharding, copies)
        variable._value = whole
    else:
        import torch

        with torch.no_grad():
            _bits_of_torch(variable.value).copy_(torch.from_numpy(array))


def _bits_of_torch(tensor):
    """The same memory in integers: NumPy has no bfloat16."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.element_size()])


def flip(variable, replica, element, bit):
    """Flips one bit of that replica's copy."""

    def flipped(array):
        bits = array.reshape(-1).view("uint8")
        bits[element * array.itemsize + bit // 8] ^= 1 << bit % 8

    change(variable, replica, flipped)


def num_bits(variable):
    return copy_of(variable).itemsize * 8


def swap(variable, replica, first, second):
    """Lets two elements of that replica's copy change places."""

    def swapped(array):
        flat = array.reshape(-1)
        flat[[first, second]] = flat[[second, first]]

    change(variable, replica, swapped)


def trained_with_many_dtypes(make_optimizer, inputs, **fit_arguments):
    """A compiled model with weights of several dtypes, a frozen layer and a BatchNormalization, after one step."""
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(6, name="frozen"),
        keras.layers.BatchNormalization(name="normalize"),
        keras.layers.Dense(7, activation="tanh", name="single"),
        keras.layers.Dense(5, dtype="bfloat16", name="brain"),
        keras.layers.Dense(4, dtype="float16", name="half"),
        keras.layers.Dense(3, dtype="float32" if BACKEND == "jax" else "float64", name="last"),
    ]
    model = keras.Sequential(layers)
    model.get_layer("frozen").trainable = False
    model.compile(make_optimizer(), "mse")
    model.fit(*inputs, verbose=0, **fit_arguments)
    return model


def compared(model):
    """The variables of which a flipped bit must be found."""
    return model.get_layer("frozen").weights + model.trainable_weights + model.optimizer.variables


def check_trials(check, model, num_replicas, flip=flip, num_trials=100):
    """Flips a random bit in each of 100 trials; `check` must name the variable and the replica every time."""
    random = np.random.default_rng(5)
    variables = compared(model)
    for trial in range(num_trials):
        variable = variables[random.integers(len(variables))]
        replica = int(random.integers(num_replicas))
        element = int(random.integers(copy_of(variable).size))
        bit = int(random.integers(num_bits(variable)))
        flip(variable, replica, element, bit)
        where = f"`{variable.path}` on replica {replica}, against replicas "
        try:
            check.check()
        except RuntimeError as error:
            assert str(error).count(" on replica") == 1, str(error)
            assert where in str(error), f"trial {trial}: {where!r} not in {error}"
        else:
            raise AssertionError(f"trial {trial}: bit {bit} of element {element} of {variable.path} not found")
        flip(variable, replica, element, bit)
    check.check()
