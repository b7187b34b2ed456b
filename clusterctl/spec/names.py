"""Names that hold without any spec: of spec files, and of what is ours on the hosts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).with_name("data")
SPEC_NAME: Final = "cluster.yaml"
DEFAULT_CLUSTER: Final = "local"  # what there is without a file
ADMIN_USER: Final = "clusterctl"
PROOF_PARTITION: Final = "clusterctl-proof"
# What jobs source first on a host where Open MPI is an environment module; of the role openmpi.
JOB_PROFILE: Final = "/opt/clusterctl/job-profile.sh"


def is_cluster_name(text: str) -> bool:
    """Whether a cluster can have this name, as the models of specs say, which take long to import."""
    pattern, _ = tomllib.loads((DATA / "patterns.toml").read_text(encoding="utf-8"))["label"]
    return re.fullmatch(pattern, text) is not None


def find_spec(start: Path) -> Path | None:
    """The spec file of a folder, if it has one. Whether it can be read is seen on reading."""
    path = start / SPEC_NAME
    return path if path.exists() or path.is_symlink() else None
