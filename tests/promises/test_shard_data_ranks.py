"""PyTorch: everything in rank_data.py, on three ranks and on two, in one spawn of workers."""

import pytest
from support import launch

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(300)]


def test_shard_data_on_ranks():
    assert "passed" in launch.torchrun("rank_data.py", 3, timeout=270)
