"""Optimizers over flat arrays. If PyTorch has the optimizer, names and formulas are PyTorch's."""
