"""The state of clusters on the user's machine: a folder per cluster, and records of its hosts and
jobs.
"""
