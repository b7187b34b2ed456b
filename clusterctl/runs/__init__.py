"""Bring the runs of jobs home, each as one checked folder."""

from clusterctl.runs.home import collect, collect_all, uncollected

__all__ = ["collect", "collect_all", "uncollected"]
