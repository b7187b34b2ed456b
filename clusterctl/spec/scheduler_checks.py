"""What a spec can't ask for where no scheduler runs the jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from clusterctl.spec import plain
from clusterctl.spec.finding import Finding
from clusterctl.spec.plain import Plain

NO_SCHEDULER: Final = "none"
_DEFAULT_ACCOUNTS: Final = ["default"]
_OR_SLURM: Final = ", or write scheduler: slurm"


def findings(spec: Mapping[str, object]) -> Iterator[Finding]:
    """Every fault of a spec with ``scheduler: none``; nothing of any other."""
    if spec.get("scheduler") != NO_SCHEDULER:
        return
    settings = plain.mapping(spec, "slurm")
    for key, message in (
        ("qos", "qualities of service are Slurm's, and there is no Slurm"),
        ("extra", "there is no slurm.conf without Slurm"),
    ):
        if settings.get(key):
            yield Finding(("slurm", key), message, f"remove {key}{_OR_SLURM}", at_key=True)
    if plain.text(plain.mapping(spec, "software"), "slurm") == "openhpc":
        message = "OpenHPC's packages are Slurm's, and there is no Slurm"
        yield Finding(("software", "slurm"), message, f"remove slurm{_OR_SLURM}", at_key=True)
    for index, user in enumerate(plain.entries(spec, "users")):
        accounts = user.get("accounts")
        if isinstance(accounts, list | tuple) and list(accounts) != _DEFAULT_ACCOUNTS:
            message = "accounts are Slurm's, and there is no Slurm"
            yield Finding(("users", index, "accounts"), message, f"remove accounts{_OR_SLURM}", at_key=True)
    provider = plain.mapping(spec, "provider")
    if provider.get("auto_down"):
        message = "only Slurm can tell that a cluster is idle"
        yield Finding(("provider", "auto_down"), message, f"remove auto_down{_OR_SLURM}", at_key=True)
    if plain.mapping(provider, "shared").get("kind") == "none" and not _is_one_host(spec, provider):
        message = "without Slurm, jobs need a folder that all hosts see"
        yield Finding(("provider", "shared", "kind"), message, f"write kind: nfs{_OR_SLURM}")


def _is_one_host(spec: Plain, provider: Plain) -> bool:
    """Whether a single machine is the whole cluster."""
    nodes = {partition.get("hosts") for partition in plain.entries(spec, "partitions")}
    return nodes == {provider.get("controller")}
