"""Optimizers over flat arrays, with PyTorch's names and formulas if it has the optimizer."""
