"""Existing machines: SSH access as their owner, host keys, clusterctl's admin account, and its
removal.
"""
