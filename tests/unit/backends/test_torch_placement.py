"""The numbers by which ranks of PyTorch compare their tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from keras_shardopt.backends.torch import placement  # noqa: E402

pytestmark = pytest.mark.backends("torch")

SIZES = [0, 1, 2, 3, 17, placement._CHUNK - 1, placement._CHUNK, 3 * placement._CHUNK + 17]
DTYPES = ["float32", "bfloat16", "uint8", "bool", "int64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_find_the_same(dtype):
    random = np.random.default_rng(0)
    for size in SIZES:
        tensor = torch.tensor(random.integers(0, 200, size).tolist()).to(getattr(torch, dtype))
        assert placement._on_host(tensor) % 2**64 == int(placement._on_device(tensor)) % 2**64


def test_tensors_without_elements_are_no_bytes():
    for shape in ((0,), (0, 3), (3, 0)):  # PyTorch takes the first one's stride of 0 from NumPy
        tensor = torch.from_numpy(np.zeros(shape, "float32"))
        assert placement._bytes(tensor).shape == (0,)
        assert placement.fingerprints([tensor]) == placement.fingerprints([torch.zeros(shape)])


@pytest.mark.parametrize("size", [1, 3, 8, placement._CHUNK + 5])
def test_no_change_of_one_bit_or_of_signs_is_lost(size):
    random = np.random.default_rng(0)
    values = random.normal(size=size).astype("float32")
    seen = {int(placement.fingerprints([torch.from_numpy(values)])[0])}
    places = sorted({0, 1 % size, size // 2, size - 2 if size > 1 else 0, size - 1})
    for place in places:
        for bit in range(32):
            changed = values.copy()
            changed.view("uint32")[place] ^= np.uint32(1 << bit)
            seen.add(int(placement.fingerprints([torch.from_numpy(changed)])[0]))
    signs = [(i, j) for i in places for j in places if i < j]
    for pair in signs:  # of which each is a change of a word's highest bit
        changed = values.copy()
        changed[list(pair)] *= -1
        seen.add(int(placement.fingerprints([torch.from_numpy(changed)])[0]))
    assert len(seen) == 1 + 32 * len(places) + len(signs)


def test_one_number_for_all_differs_where_one_does():
    random = np.random.default_rng(0)
    sizes = [3, 330, 5, placement._JOINED_BYTES, 7, 1]
    tensors = [torch.from_numpy(random.normal(size=size).astype("float32")) for size in sizes]
    tensors[2] = tensors[2].to(torch.bfloat16).requires_grad_()
    seen = {placement.joint_fingerprint(tensors)}
    for i, tensor in enumerate(tensors):
        changed = tensor.detach().clone()
        changed[-1] += 1
        seen.add(placement.joint_fingerprint([*tensors[:i], changed, *tensors[i + 1 :]]))
    seen.add(placement.joint_fingerprint([tensors[1], tensors[0], *tensors[2:]]))
    assert len(seen) == 2 + len(tensors)
