"""How what is ours at Google is known again: labels, or words in a description where there are none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

CLUSTER_LABEL: Final = "clusterctl-cluster"
ID_LABEL: Final = "clusterctl-id"
_TERRAFORMS: Final = ("effective_labels", "terraform_labels")
_WORDS = re.compile(rf"\b({CLUSTER_LABEL}|{ID_LABEL})=([a-z0-9-]+)")


def labels(cluster: str, cluster_id: str) -> dict[str, str]:
    """What every resource of a cluster is labelled with."""
    return {CLUSTER_LABEL: cluster, ID_LABEL: cluster_id}


def description(cluster: str, cluster_id: str) -> str:
    """The same in words, for what can't carry labels."""
    return f"{CLUSTER_LABEL}={cluster} {ID_LABEL}={cluster_id}"


def read(resource: Mapping[str, Any]) -> dict[str, str]:
    """The labels of a resource of the REST API, or what its description says instead."""
    return resource.get("labels") or dict(_WORDS.findall(resource.get("description") or ""))


def cluster_id_of(resource: Mapping[str, Any]) -> str | None:
    """Whose a resource of Terraform's is, by label or description; None where it bears neither."""
    for found in [*(resource.get(name) for name in _TERRAFORMS), read(resource)]:
        if found and ID_LABEL in found:
            return str(found[ID_LABEL])
    return None
