"""PyTorch: errors of a group reach ranks of other groups."""

import pytest

pytestmark = pytest.mark.backends("torch")
pytest.importorskip("torch", reason="about PyTorch, which is not installed")


def test_each_rank_raises_an_error_of_another_group_once(monkeypatch):
    import torch.distributed as dist

    from keras_shardopt.backends.torch import group_failures

    store = dist.HashStore()
    monkeypatch.setattr(group_failures, "job_store", lambda: store)
    here, elsewhere = group_failures.GroupFailures(), group_failures.GroupFailures()
    assert not elsewhere.has_new() and elsewhere.read() == ""
    for words in ("All replicas must agree.", "All replicas must agree."):
        here.report(words, first_member=2)
        assert not here.has_new() and elsewhere.has_new()
        assert elsewhere.read() == words and not elsewhere.has_new()
