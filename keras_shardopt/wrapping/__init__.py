"""An optimizer that stands for another."""
