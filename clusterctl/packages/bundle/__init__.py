"""Everything that a cluster is installed from, in one file, for hosts without a route out."""

from clusterctl.packages.bundle.archive import Bundle, open_bundle
from clusterctl.packages.bundle.checks import Wrong, damages, misfits, refuse
from clusterctl.packages.bundle.create import Wanted, create
from clusterctl.packages.bundle.use import forget, gone, remembered, take

__all__ = [
    "Bundle",
    "Wanted",
    "Wrong",
    "create",
    "damages",
    "forget",
    "gone",
    "misfits",
    "open_bundle",
    "refuse",
    "remembered",
    "take",
]
