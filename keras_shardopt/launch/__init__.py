"""Starts a training program in several processes: `python -m keras_shardopt.launch --nproc 2 train.py`."""
