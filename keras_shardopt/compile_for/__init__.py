"""The training step of a program, compiled for a TPU or GPU that this machine does not have."""
