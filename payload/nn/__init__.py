"""Layers with a forward and a backward pass, over flat buffers of parameters and gradients."""
