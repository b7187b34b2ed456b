"""Everything that a cluster is installed from, in one file, for hosts without a route out."""

from clusterctl.bundle.archive import Bundle, open_bundle
from clusterctl.bundle.checks import Wrong, damages, misfits, refuse
from clusterctl.bundle.create import Wanted, create
from clusterctl.bundle.ship import lacking, ship
from clusterctl.bundle.use import forget, gone, remembered, take

__all__ = [
    "Bundle",
    "Wanted",
    "Wrong",
    "create",
    "damages",
    "forget",
    "gone",
    "lacking",
    "misfits",
    "open_bundle",
    "refuse",
    "remembered",
    "ship",
    "take",
]
