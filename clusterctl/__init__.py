"""clusterctl: create a Slurm cluster from a YAML file, run jobs on it, and collect their results.

Python programs can call the commands of the command line as functions: see docs/python.md.
"""

# ruff: noqa: F403, F405 - `__all__` of api.py has the names

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "ClusterMoment",
    "ClusterctlError",
    "Job",
    "Rehearsal",
    "Report",
    "Row",
    "Status",
    "UsageReport",
    "compare",
    "frame",
    "list_runs",
    "named_run",
    "report",
]

if TYPE_CHECKING:
    from clusterctl.api import *
else:

    def __getattr__(name: str) -> Any:
        """Import the API on first use only, because every command imports this package."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from clusterctl import api  # noqa: PLC0415

        return getattr(api, name)
