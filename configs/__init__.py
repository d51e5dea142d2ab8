"""Hydra configs: train.yaml and its groups."""
