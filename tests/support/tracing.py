"""`torch.compile` without what takes it longest."""

import contextlib
import functools
from unittest import mock


@contextlib.contextmanager
def without_generated_code():
    """A block in which `torch.compile` traces as ever and runs what it has traced as it is."""
    import torch

    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        yield
    torch._dynamo.reset()
