"""Optimizers over flat arrays, with the names and formulas of PyTorch's where it has them."""
