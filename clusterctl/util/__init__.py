"""Processes, parallel calls, assets, rendering, progress."""
