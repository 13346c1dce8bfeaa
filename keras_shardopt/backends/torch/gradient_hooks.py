"""Hooks that PyTorch calls during a backward pass, as soon as the `.grad` of a weight is computed.

Private names of PyTorch: `Tensor._post_accumulate_grad_hooks` - the hooks of a tensor by the `id` of their handles.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from keras_shardopt.numerics import Tensor


class GradientHooks:
    """The hooks of all parameters. They exist as long as this object."""

    def __init__(self) -> None:
        self.receiver: Any = None
        """The object whose method `take(i, parameter)` the hooks call. None outside of backward passes."""
        self.parameters: list[Tensor] = []
        self.trainable: list[bool] = []
        """Whether each parameter is trained, and therefore has a hook."""
        self._hooks: list[tuple[dict[int, Any], int]] = []

    def follow(self, parameters: list[Tensor]) -> None:
        """Make these the parameters with hooks. Layers can be frozen or unfrozen between two calls."""
        trainable = [parameter.requires_grad for parameter in parameters]
        if trainable == self.trainable and all(a is b for a, b in zip(parameters, self.parameters)):
            return
        self._remove()
        self.parameters, self.trainable = parameters, trainable
        owner = weakref.ref(self)
        for i, parameter in enumerate(parameters):
            if trainable[i]:
                handle = parameter.register_post_accumulate_grad_hook(_Hook(owner, i))
                self._hooks.append((parameter._post_accumulate_grad_hooks, handle.id))

    def have_others(self) -> bool:
        """Return whether a parameter also has a hook from elsewhere, which reads `.grad`."""
        of_each = [parameter._post_accumulate_grad_hooks or {} for parameter in self.parameters]
        return any(not isinstance(hook, _Hook) for hooks in of_each for hook in hooks.values())

    def _remove(self) -> None:
        # Do not call `handle.remove()`: a handle has only a weak reference to its hooks, which the garbage collector
        # can clear while the parameters still exist.
        for hooks, key in self._hooks:
            hooks.pop(key, None)
        self._hooks = []

    # Use `__del__`, because `torch.compile` would recompile when the registry of `weakref.finalize` changes.
    def __del__(self) -> None:
        self._remove()


class _Hook:
    """The hook of parameter `i`."""

    def __init__(self, owner: weakref.ref[GradientHooks], i: int) -> None:
        self._owner, self._i = owner, i

    def __call__(self, parameter: Tensor) -> None:
        hooks = self._owner()
        if hooks is not None and hooks.receiver is not None:
            take = hooks.receiver.take
            # Gradients are enabled here only if the backward pass is differentiated. Otherwise skip `no_grad`.
            take = torch.no_grad()(take) if torch.is_grad_enabled() else take
            take(self._i, parameter)
