"""Whether a proof job was right; else who is to blame, and for what."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Final

from clusterctl.cluster.diagnose import Connect, cut_off, each_alone
from clusterctl.errors import Failure, VerifyError
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Result

Probe = Callable[[tuple[str, ...]], Result]  # runs the bundled probe, one rank on each of these hosts
TIMED_OUT = 124  # timeout(1)'s exit code
_ADVICE: Final = re.compile(
    r"^-{40,}\n.*?^-{40,}$\n?", re.MULTILINE | re.DOTALL
)  # Open MPI's, of what may be wrong
_DENIED: Final = re.compile(r"\S+@\S+: Permission denied \(.*\)")  # what ssh says
_LET_IN: Final = (
    "let job users log in there with their keys (AllowUsers, AllowGroups, AuthorizedKeysFile in sshd_config;"
    " `clusterctl up --reconfigure` puts back a key that somebody removed)"
)


def is_right(result: Result, hosts: tuple[str, ...]) -> bool:
    """Whether as many ranks agreed as there are hosts."""
    try:
        answer = json.loads(result.stdout)
        return result.rc == 0 and answer["ok"] is True and answer["world_size"] == len(hosts)
    except (ValueError, KeyError, TypeError):
        return False


def failed(
    result: Result,
    hosts: tuple[str, ...],
    inventory: Inventory,
    to: Connect,
    probe: Probe,
    *,
    alike: bool = False,
) -> VerifyError:
    """Who is to blame, and for what: found out by smaller questions where the job itself does not say.

    ``alike``: it is known to be no single host's fault.
    """
    said = _words(result)
    if alike:
        failures = tuple(Failure("verify", said, host, "verify") for host in hosts)
    else:
        failures = _blamed_by_probe(result) or _blamed_by_parts(hosts, inventory, to, probe)
    if not failures:
        fix = _LET_IN if _DENIED.search(said) else ""
        named = tuple(_named(said, hosts, inventory)) or hosts
        failures = tuple(Failure("verify", said, host, "verify", fix) for host in named)
    hosts_of = {failure.cause: str(failure.host) for failure in reversed(failures)}
    told = (cause if host in cause else f"{host}: {cause}" for cause, host in hosts_of.items())
    fixes = "; ".join(dict.fromkeys(failure.fix for failure in failures if failure.fix))
    return VerifyError(
        f"the proof job failed on {', '.join(str(f.host) for f in failures)}",
        why="; ".join(told),
        fix=f"{fixes or 'correct the cause on these hosts'}, then run `clusterctl up` again",
        failures=failures,
    )


def _named(said: str, hosts: tuple[str, ...], inventory: Inventory) -> Iterator[str]:
    """The hosts that are spoken of, by name or by address."""
    for host in inventory.hosts:
        words = "|".join(map(re.escape, (host.name, host.address)))
        if host.name in hosts and re.search(rf"(?<![\w.-])({words})(?![\w-]|\.\w)", said):
            yield host.name


def _blamed_by_probe(result: Result) -> tuple[Failure, ...]:
    """The hosts of which the probe itself says what is wrong."""
    try:
        found = json.loads(result.stdout)["failures"]
        return tuple(Failure("verify", str(one["cause"]), str(one["host"]), "verify") for one in found)
    except (ValueError, KeyError, TypeError):
        return ()


def _blamed_by_parts(
    hosts: tuple[str, ...], inventory: Inventory, to: Connect, probe: Probe
) -> tuple[Failure, ...]:
    def alone(host: str) -> str | None:
        result = probe((host,))
        return None if is_right(result, (host,)) else _words(result)

    return cut_off(inventory, hosts, to) or (each_alone(hosts, alone) if len(hosts) > 1 else ())


def _words(result: Result) -> str:
    said = result.stderr.strip() or result.stdout.strip()
    said = (_ADVICE.sub("", f"{said}\n").strip() or said)[-2000:]
    if result.rc == TIMED_OUT:
        said = f"it did not end in time\n{said}".strip()
    return said or f"it ended with exit code {result.rc} and said nothing"
