"""Compiles the training step of a program for a TPU or GPU that this machine does not have."""
