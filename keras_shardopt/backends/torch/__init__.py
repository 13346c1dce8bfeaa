"""The ranks of `torch.distributed`."""
