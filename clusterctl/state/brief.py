"""What verbs about jobs need of a cluster's record, without its models, which take 0.1 s to import."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from clusterctl.state.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Brief:
    """A cluster with Slurm and a shared folder: its controller, its nodes, the account of its jobs."""

    cluster: str
    provider: str
    controller: str
    compute: tuple[str, ...]
    job_user: str
    pmix: bool


def brief_of(workspace: Workspace) -> Brief | None:
    """None where the cluster is another one, or not up, or its record is not as `up` writes it."""
    try:
        of: dict[str, Any] = json.loads(workspace.inventory.read_bytes())
        roles = {str(host["name"]): host["roles"] for host in of["hosts"]}
        found = Brief(
            cluster=of["cluster"],
            provider=of["provider"],
            controller=next(name for name, has in roles.items() if "controller" in has),
            compute=tuple(name for name, has in roles.items() if "compute" in has),
            job_user=of["job_user"],
            pmix=of["pmix"],
        )
        is_one = of["scheduler"] == "slurm" and of["shared_folder"]["kind"] != "none"
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None
    texts = (found.cluster, found.provider, found.job_user)
    is_right = all(isinstance(text, str) for text in texts) and isinstance(found.pmix, bool)
    return found if is_one and is_right else None
