"""Weights without values. Functions that use them get gathered values.

PyTorch passes each function call on a `HeldParameter` to its method `__torch_function__`, which calls the function with
the gathered values.

Private names of PyTorch: `torch._C.DisableTorchFunctionSubclass` - functions skip `__torch_function__` in its block;
`Tensor._version` - counts changes in place.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_shardopt.numerics import Tensor


def part_of(parameter: Tensor, flat: Tensor, at: int) -> Tensor:
    """Return the values of a weight, which begin at this position of its bucket's memory."""
    return flat[at : at + parameter.numel()].view(parameter.shape)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, flat: Tensor, at: int) -> Tensor:
        return part_of(parameter, flat, at)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class HeldParameter(torch.nn.Parameter):
    """A weight whose values are divided among ranks. Functions get the gathered values."""

    _keras_shardopt_holder: Any
    """The `WeightsOfOptimizer`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with gathered values. Attributes such as `grad` and `shape` need no values."""
        name, kwargs = func.__name__, kwargs or {}
        attribute = getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__", "__delete__") else None
        with torch._C.DisableTorchFunctionSubclass():
            if (attribute not in _DATA) if attribute is not None else name in _WITHOUT_VALUES:
                return func(*args, **kwargs)
            in_place = (name[-1] == "_" and name[-2:] != "__") or name == "__setitem__" or name.startswith("__i")
            found: list[Any] = []

            def values(value: Any) -> Any:
                if isinstance(value, HeldParameter):
                    bucket, at = value._keras_shardopt_holder.places[id(value)]
                    flat = bucket.gathers.gathered(bucket)
                    found.append((bucket, flat, flat._version))
                    if value.requires_grad and torch.is_grad_enabled() and not in_place and attribute is None:
                        return _Values.apply(value, flat, at)  # gradients of these values become those of the weight
                    return part_of(value, flat, at)
                if isinstance(value, (list, tuple)):
                    return type(value)(map(values, value))
                return value

            if attribute == "data":  # `data` itself would not share the version of the values
                with torch.no_grad():
                    result = values(args[0]).copy_(args[1]) if name == "__set__" else values(args[0]).detach()
            else:
                result = func(*map(values, args), **{key: values(value) for key, value in kwargs.items()})
            for bucket, flat, version in found:
                bucket.store_changes(flat, version)
            # `values` refers to itself, so until garbage is collected, `found` would keep the memory of buckets.
            found.clear()
            return result

    def _whole(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.data.clone(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return a whole weight. All ranks must call this together."""
        memo[id(self)] = copied = self._whole()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a whole weight. All ranks must call this together."""
        return self._whole().__reduce_ex__(protocol)


_DATA = {"T", "mT", "H", "mH", "real", "imag", "data"}
_WITHOUT_VALUES = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous", "get_device"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_floating_point", "is_complex"),
    *("untyped_storage", "storage_offset", "__len__", "is_tensor", "new_full", "new_empty", "new_zeros"),
    *("grad", "backward"),  # functions of `torch.autograd`: they need the weight itself
}
