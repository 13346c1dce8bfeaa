"""Saves and loads models and training state from several processes together."""
