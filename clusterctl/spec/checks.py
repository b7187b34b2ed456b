"""What must hold between the fields of a spec.

The checks read plain values, as a file gives them, and pass over what is malformed: that is reported by the
field itself. So a file's cross-field faults come out together with all its other faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from clusterctl.spec import gcp_checks, onprem_checks, plain, scheduler_checks
from clusterctl.spec.finding import Finding, Loc, dotted
from clusterctl.spec.nvidia import Nvidia
from clusterctl.spec.words import shown

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
        yield from onprem_checks.findings(spec)
    if kind in ("local", "gcp"):
        yield from _no_hosts(spec)
        yield from _debian_alone(spec)
    yield from scheduler_checks.findings(spec)
    yield from _no_twins(spec, ("partitions",), "name")
    yield from _no_twins(spec, ("users",), "name")
    yield from _no_twins(spec, ("users",), "uid")
    yield from _no_twins(spec, ("slurm", "qos"), "name")
    yield from _no_setting_twice(spec)
    for index, user in enumerate(plain.entries(spec, "users")):
        yield from _no_repeats(user, ("users", index, "accounts"))


def _hosts_fit(spec: Mapping[str, object]) -> Iterator[Finding]:
    counts = [p.get("nodes") for p in plain.entries(spec, "partitions")]
    hosts = 1 + sum(n for n in counts if isinstance(n, int) and n > 0)
    if hosts > MAX_LOCAL_HOSTS:
        message = (
            f"these nodes and the controller are more than the {MAX_LOCAL_HOSTS} hosts of a local cluster"
        )
        yield Finding(("partitions",), message, f"ask for at most {MAX_LOCAL_HOSTS - 1} nodes", at_key=True)


def _debian_alone(spec: Mapping[str, object]) -> Iterator[Finding]:
    software = plain.mapping(spec, "software")
    at: Loc = ("software", "slurm")
    if software.get("slurm") == "openhpc":
        message = "OpenHPC has no packages for Debian, which the nodes are"
        yield Finding(at, message, "remove slurm", at_key=True)
    if any(plain.mapping(software, "mirrors").values()):
        message = "these are for Rocky Linux and RHEL, and the nodes are Debian"
        yield Finding(("software", "mirrors"), message, "remove mirrors", at_key=True)


def _no_gpus(spec: Mapping[str, object]) -> Iterator[Finding]:
    for index, partition in enumerate(plain.entries(spec, "partitions")):
        if partition.get("gpus") is not None:
            at = ("partitions", index, "gpus")
            yield Finding(at, "local nodes have no GPUs to give", "remove gpus", at_key=True)


def _no_apptainer(spec: Mapping[str, object]) -> Iterator[Finding]:
    if plain.is_on(plain.mapping(spec, "software"), "apptainer"):
        message = "local nodes have no route out, and their image has no Apptainer"
        yield Finding(("software", "apptainer"), message, "remove apptainer", at_key=True)


def _no_nvidia(spec: Mapping[str, object]) -> Iterator[Finding]:
    plainly = Nvidia().model_dump()
    if any(value != plainly.get(key) for key, value in plain.mapping(spec, "software", "nvidia").items()):
        message = "local nodes have no GPUs, and their kernel is this machine's"
        yield Finding(("software", "nvidia"), message, "remove nvidia", at_key=True)


def _no_hosts(spec: Mapping[str, object]) -> Iterator[Finding]:
    for index, partition in enumerate(plain.entries(spec, "partitions")):
        if partition.get("hosts") is not None:
            at = ("partitions", index, "hosts")
            yield Finding(
                at, "hosts are machines of your own", "write nodes: N, or type: onprem", at_key=True
            )


def _no_twins(spec: Mapping[str, object], where: tuple[str, ...], field: str) -> Iterator[Finding]:
    first: dict[object, int] = {}
    for index, entry in enumerate(plain.entries(spec, *where)):
        value = entry.get(field)
        if not isinstance(value, str | int):
            continue
        if value in first:
            message = f"{field} {shown(value)} is that of {dotted((*where, first[value]))} already"
            yield Finding((*where, index, field), message, f"every {field} must be another")
        else:
            first[value] = index


def _no_repeats(entry: Mapping[str, object], where: Loc) -> Iterator[Finding]:
    values = entry.get(where[-1]) if isinstance(where[-1], str) else None
    seen: Counter[str] = Counter()
    for index, value in enumerate(values if isinstance(values, list | tuple) else ()):
        if isinstance(value, str):
            seen[value] += 1
            if seen[value] > 1:
                yield Finding((*where, index), f"{shown(value)} stands in this list already", "remove it")


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
