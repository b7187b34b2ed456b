"""Data sets and the order in which they are walked."""
