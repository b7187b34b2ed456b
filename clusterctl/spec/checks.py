"""What must hold between the fields of a spec.

The checks read raw values, as the file gives them, and skip malformed ones, which the field itself reports:
so a file's cross-field faults are reported together with all its other faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from clusterctl.spec import gcp_checks, onprem, raw
from clusterctl.spec.messages import Finding, Loc, dotted, shown
from clusterctl.spec.raw import Raw
from clusterctl.spec.software import Nvidia

MAX_LOCAL_HOSTS = 250  # addresses of a /24, less the network, the broadcast, this machine and a few spare


def findings(spec: Mapping[str, object]) -> Iterator[Finding]:
    """Every cross-field fault of a spec given as plain values."""
    provider = spec.get("provider", {})
    kind = provider.get("type", "local") if isinstance(provider, Mapping) else None
    if kind == "local":
        yield from _hosts_fit(spec)
        yield from _no_gpus(spec)
        yield from _no_apptainer(spec)
        yield from _no_nvidia(spec)
    elif kind == "gcp":
        yield from gcp_checks.findings(spec)
    elif kind == "onprem":
        yield from onprem.findings(spec)
    if kind in ("local", "gcp"):
        yield from _no_hosts(spec)
        yield from _debian_alone(spec)
    yield from _no_slurm(spec)
    yield from _no_twins(spec, ("partitions",), "name")
    yield from _no_twins(spec, ("users",), "name")
    yield from _no_twins(spec, ("users",), "uid")
    yield from _no_twins(spec, ("slurm", "qos"), "name")
    yield from _no_setting_twice(spec)
    for index, user in enumerate(raw.entries(spec, "users")):
        yield from _no_repeats(user, ("users", index, "accounts"))


def _hosts_fit(spec: Mapping[str, object]) -> Iterator[Finding]:
    counts = [p.get("nodes") for p in raw.entries(spec, "partitions")]
    hosts = 1 + sum(n for n in counts if isinstance(n, int) and n > 0)
    if hosts > MAX_LOCAL_HOSTS:
        message = (
            f"these nodes and the controller are more than the {MAX_LOCAL_HOSTS} hosts of a local cluster"
        )
        yield Finding(("partitions",), message, f"ask for at most {MAX_LOCAL_HOSTS - 1} nodes", at_key=True)


def _debian_alone(spec: Mapping[str, object]) -> Iterator[Finding]:
    software = raw.mapping(spec, "software")
    at: Loc = ("software", "slurm")
    if software.get("slurm") == "openhpc":
        message = "OpenHPC has no packages for Debian, which the nodes are"
        yield Finding(at, message, "remove slurm", at_key=True)
    if any(raw.mapping(software, "mirrors").values()):
        message = "these are for Rocky Linux and RHEL, and the nodes are Debian"
        yield Finding(("software", "mirrors"), message, "remove mirrors", at_key=True)


def _no_gpus(spec: Mapping[str, object]) -> Iterator[Finding]:
    for index, partition in enumerate(raw.entries(spec, "partitions")):
        if partition.get("gpus") is not None:
            at = ("partitions", index, "gpus")
            yield Finding(at, "local nodes have no GPUs", "remove gpus", at_key=True)


def _no_apptainer(spec: Mapping[str, object]) -> Iterator[Finding]:
    if raw.is_on(raw.mapping(spec, "software"), "apptainer"):
        message = "local nodes have no route out, and their image has no Apptainer"
        yield Finding(("software", "apptainer"), message, "remove apptainer", at_key=True)


def _no_nvidia(spec: Mapping[str, object]) -> Iterator[Finding]:
    plainly = Nvidia().model_dump()
    if any(value != plainly.get(key) for key, value in raw.mapping(spec, "software", "nvidia").items()):
        message = "local nodes have no GPUs, and their kernel is this machine's"
        yield Finding(("software", "nvidia"), message, "remove nvidia", at_key=True)


def _no_hosts(spec: Mapping[str, object]) -> Iterator[Finding]:
    for index, partition in enumerate(raw.entries(spec, "partitions")):
        if partition.get("hosts") is not None:
            at = ("partitions", index, "hosts")
            yield Finding(
                at, "hosts are machines of your own", "write nodes: N, or type: onprem", at_key=True
            )


def _no_twins(spec: Mapping[str, object], where: tuple[str, ...], field: str) -> Iterator[Finding]:
    first: dict[object, int] = {}
    for index, entry in enumerate(raw.entries(spec, *where)):
        value = entry.get(field)
        if not isinstance(value, str | int):
            continue
        if value in first:
            message = f"{field} {shown(value)} is that of {dotted((*where, first[value]))} already"
            yield Finding((*where, index, field), message, f"every {field} must be unique")
        else:
            first[value] = index


def _no_repeats(entry: Mapping[str, object], where: Loc) -> Iterator[Finding]:
    values = entry.get(where[-1]) if isinstance(where[-1], str) else None
    seen: Counter[str] = Counter()
    for index, value in enumerate(values if isinstance(values, list | tuple) else ()):
        if isinstance(value, str):
            seen[value] += 1
            if seen[value] > 1:
                yield Finding((*where, index), f"{shown(value)} is in this list already", "remove it")


def _no_setting_twice(spec: Mapping[str, object]) -> Iterator[Finding]:
    slurm = spec.get("slurm")
    lines = slurm.get("extra") if isinstance(slurm, Mapping) else None
    seen: set[str] = set()
    for index, line in enumerate(lines if isinstance(lines, list | tuple) else ()):
        if not isinstance(line, str) or "=" not in line:
            continue
        key = line.partition("=")[0].strip()
        if key.lower() in seen:
            yield Finding(
                ("slurm", "extra", index), f"{shown(key)} is set above already", "keep one of the two"
            )
        seen.add(key.lower())


NO_SCHEDULER: Final = "none"
_DEFAULT_ACCOUNTS: Final = ["default"]
_OR_SLURM: Final = ", or write scheduler: slurm"


def _no_slurm(spec: Mapping[str, object]) -> Iterator[Finding]:
    """Every fault of a spec with ``scheduler: none``; nothing of any other."""
    if spec.get("scheduler") != NO_SCHEDULER:
        return
    settings = raw.mapping(spec, "slurm")
    for key, message in (
        ("qos", "qualities of service are Slurm's, and there is no Slurm"),
        ("extra", "there is no slurm.conf without Slurm"),
    ):
        if settings.get(key):
            yield Finding(("slurm", key), message, f"remove {key}{_OR_SLURM}", at_key=True)
    if raw.text(raw.mapping(spec, "software"), "slurm") == "openhpc":
        message = "OpenHPC's packages are Slurm's, and there is no Slurm"
        yield Finding(("software", "slurm"), message, f"remove slurm{_OR_SLURM}", at_key=True)
    for index, user in enumerate(raw.entries(spec, "users")):
        accounts = user.get("accounts")
        if isinstance(accounts, list | tuple) and list(accounts) != _DEFAULT_ACCOUNTS:
            message = "accounts are Slurm's, and there is no Slurm"
            yield Finding(("users", index, "accounts"), message, f"remove accounts{_OR_SLURM}", at_key=True)
    provider = raw.mapping(spec, "provider")
    if provider.get("auto_down"):
        message = "only Slurm can tell that a cluster is idle"
        yield Finding(("provider", "auto_down"), message, f"remove auto_down{_OR_SLURM}", at_key=True)
    if raw.mapping(provider, "shared").get("kind") == "none" and not _is_one_host(spec, provider):
        message = "without Slurm, jobs need a folder that all hosts see"
        yield Finding(("provider", "shared", "kind"), message, f"write kind: nfs{_OR_SLURM}")


def _is_one_host(spec: Raw, provider: Raw) -> bool:
    """Whether a single machine is the whole cluster."""
    nodes = {partition.get("hosts") for partition in raw.entries(spec, "partitions")}
    return nodes == {provider.get("controller")}
