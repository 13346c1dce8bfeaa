"""Examines the machines, settings and network of a job before it trains: `python -m keras_shardopt.doctor`."""
