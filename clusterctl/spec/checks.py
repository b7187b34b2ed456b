"""Cross-field checks of a spec that hold with every provider, and what all checks share.

The checks read raw values, as the file gives them, and skip malformed ones, which the field itself reports:
so a file's cross-field faults are reported together with all its other faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from clusterctl.spec.messages import Finding, Loc, dotted, shown
from clusterctl.spec.units import parse_duration_s, parse_size_mib

Raw = Mapping[str, object]


def mapping(values: Raw, *path: str) -> Raw:
    """The mapping at a path, else an empty one."""
    value: object = values
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def entries(values: Raw, *path: str) -> Iterator[Raw]:
    """The mappings of the list at a path; an empty one in place of what is malformed keeps the count."""
    *above, last = path
    for entry in items(mapping(values, *above).get(last)):
        yield entry if isinstance(entry, Mapping) else {}


def items(value: object) -> tuple[object, ...]:
    """The entries of a list; none of anything else."""
    return tuple(value) if isinstance(value, list | tuple) else ()


def text(values: Raw, key: str) -> str | None:
    """The text under a key."""
    value = values.get(key)
    return value if isinstance(value, str) else None


def whole(values: Raw, key: str) -> int | None:
    """The whole number under a key."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_on(values: Raw, key: str, *, default: bool = False) -> bool:
    """Whether a switch is on."""
    value = values.get(key)
    return value if isinstance(value, bool) else default


def size_mib(values: Raw, key: str) -> int | None:
    """The size under a key."""
    return _parsed(parse_size_mib, values.get(key))


def duration_s(values: Raw, key: str) -> int | None:
    """The duration under a key."""
    return _parsed(parse_duration_s, values.get(key))


def _parsed(parse: Callable[[object], int], value: object) -> int | None:
    try:
        return parse(value)
    except ValueError:
        return None


def node_count(spec: Raw) -> int:
    """The nodes of all partitions, without the controller."""
    return sum(max(whole(partition, "nodes") or 0, 0) for partition in entries(spec, "partitions"))


def common_findings(spec: Raw) -> Iterator[Finding]:
    """The cross-field faults that are ones with every provider."""
    yield from _without_slurm(spec)
    for where, field in ((("partitions",), "name"), (("users",), "name"), (("users",), "uid")):
        yield from _not_unique(spec, where, field)
    yield from _not_unique(spec, ("slurm", "qos"), "name")
    yield from _set_twice(spec)
    for index, user in enumerate(entries(spec, "users")):
        accounts = items(user.get("accounts"))
        for number, account in enumerate(accounts):
            if isinstance(account, str) and account in accounts[:number]:
                at = ("users", index, "accounts", number)
                yield Finding(at, f"{shown(account)} is in this list already", "remove it")


def _not_unique(spec: Raw, where: tuple[str, ...], field: str) -> Iterator[Finding]:
    first: dict[object, int] = {}
    for index, entry in enumerate(entries(spec, *where)):
        value = entry.get(field)
        if isinstance(value, str | int) and first.setdefault(value, index) != index:
            message = f"{field} {shown(value)} is that of {dotted((*where, first[value]))} already"
            yield Finding((*where, index, field), message, f"every {field} must be unique")


def _set_twice(spec: Raw) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, line in enumerate(items(mapping(spec, "slurm").get("extra"))):
        if isinstance(line, str) and "=" in line:
            key = line.partition("=")[0].strip()
            if key.lower() in seen:
                message = f"{shown(key)} is set above already"
                yield Finding(("slurm", "extra", index), message, "keep one of the two")
            seen.add(key.lower())


NO_SCHEDULER: Final = "none"
_DEFAULT_ACCOUNTS: Final = ("default",)
_OR_SLURM: Final = ", or write scheduler: slurm"


def _without_slurm(spec: Raw) -> Iterator[Finding]:
    """Every fault of a spec with ``scheduler: none``; nothing of any other."""
    if spec.get("scheduler") != NO_SCHEDULER:
        return
    slurm, provider = mapping(spec, "slurm"), mapping(spec, "provider")
    is_openhpc = text(mapping(spec, "software"), "slurm") == "openhpc"
    settings: list[tuple[Loc, object, str]] = [
        (("slurm", "qos"), slurm.get("qos"), "qualities of service are Slurm's, and there is no Slurm"),
        (("slurm", "extra"), slurm.get("extra"), "there is no slurm.conf without Slurm"),
        (("software", "slurm"), is_openhpc, "OpenHPC's packages are Slurm's, and there is no Slurm"),
        (("provider", "auto_down"), provider.get("auto_down"), "only Slurm can tell that a cluster is idle"),
    ]
    for index, user in enumerate(entries(spec, "users")):
        accounts = user.get("accounts")
        is_set = isinstance(accounts, list | tuple) and tuple(accounts) != _DEFAULT_ACCOUNTS
        settings.append((("users", index, "accounts"), is_set, "accounts are Slurm's, and there is no Slurm"))
    for at, value, message in settings:
        if value:
            yield Finding(at, message, f"remove {at[-1]}{_OR_SLURM}", at_key=True)
    nodes = [partition.get("hosts") for partition in entries(spec, "partitions")]
    is_one_host = bool(nodes) and all(hosts == provider.get("controller") for hosts in nodes)
    if mapping(provider, "shared").get("kind") == "none" and not is_one_host:
        message = "without Slurm, jobs need a folder that all hosts see"
        yield Finding(("provider", "shared", "kind"), message, f"write kind: nfs{_OR_SLURM}")


def debian_findings(spec: Raw) -> Iterator[Finding]:
    """The faults of a spec whose provider creates its hosts, which have Debian by default."""
    for index, partition in enumerate(entries(spec, "partitions")):
        if partition.get("hosts") is not None:
            at, fix = ("partitions", index, "hosts"), "write nodes: N, or type: onprem"
            yield Finding(at, "hosts are machines of your own", fix, at_key=True)
    software = mapping(spec, "software")
    if software.get("slurm") == "openhpc":
        message = "OpenHPC has no packages for Debian, which the nodes are"
        yield Finding(("software", "slurm"), message, "remove slurm", at_key=True)
    if any(mapping(software, "mirrors").values()):
        message = "these are for Rocky Linux and RHEL, and the nodes are Debian"
        yield Finding(("software", "mirrors"), message, "remove mirrors", at_key=True)
