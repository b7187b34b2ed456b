"""Layers with a forward and a backward pass. Their parameters and gradients are in flat buffers."""
