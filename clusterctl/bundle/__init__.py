"""Everything that a cluster is installed from, in one file, for hosts without a route out."""

from clusterctl.bundle.archive import Bundle, open_bundle
from clusterctl.bundle.checks import Wrong, damages, misfits, refuse
from clusterctl.bundle.create import Wanted, create
from clusterctl.bundle.ship import ship
from clusterctl.bundle.use import Remembered, forget, remembered, take

__all__ = [
    "Bundle",
    "Remembered",
    "Wanted",
    "Wrong",
    "create",
    "damages",
    "forget",
    "misfits",
    "open_bundle",
    "refuse",
    "remembered",
    "ship",
    "take",
]
