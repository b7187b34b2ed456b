"""Names that hold without any spec: of spec files, and of what is ours on the hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SPEC_NAME: Final = "cluster.yaml"
DEFAULT_CLUSTER: Final = "local"  # what there is without a file
ADMIN_USER: Final = "clusterctl"
PROOF_PARTITION: Final = "clusterctl-proof"
# What jobs source first on a host where Open MPI is an environment module; of the role openmpi.
JOB_PROFILE: Final = "/opt/clusterctl/job-profile.sh"


def find_spec(start: Path) -> Path | None:
    """The spec file of a folder, if it has one. Whether it can be read is seen on reading."""
    path = start / SPEC_NAME
    return path if path.exists() or path.is_symlink() else None
