"""What Terraform and Google say when something fails, as failures with cause and fix; the rules are data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter
from ruamel.yaml import YAML

from clusterctl.errors import Failure, TerraformError
from clusterctl.providers.gcp.terraform.run import Diagnostic
from clusterctl.spec.base import Model

Explain = Callable[[str, tuple[Diagnostic, ...]], TerraformError]

_RULES: Final = Path(__file__).parent / "data" / "diagnoses.yaml"
_NODE: Final = re.compile(r'^module\.nodes\.module\.node\["([^"]+)"\]\.')
_CONTROLLER: Final = "module.controller."
_UNKNOWN: Final = "terraform"
_TAKEN: Final = "name-taken"
_NAMED: Final = 5  # hosts of one cause
_OWN_ACCOUNT: Final = "projects/{project}/serviceAccounts/{account}@{project}.iam.gserviceaccount.com"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster is. ``enables_apis``: an API that is off is one that was just switched on."""

    project: str
    zone: str
    controller: str  # its host's name
    enables_apis: bool = False

    @property
    def region(self) -> str:
        """The region that the zone is in."""
        return self.zone.rsplit("-", 1)[0]

    def host_of(self, address: str) -> str | None:
        """The host that a resource of our module belongs to."""
        if node := _NODE.match(address):
            return node.group(1)
        return self.controller if address.startswith(_CONTROLLER) else None


class Rule(Model):
    """One entry of diagnoses.yaml."""

    code: str
    match: Sequence[str]
    cause: str
    fix: str
    transient: bool = False
    later: bool = False

    def groups(self, text: str) -> Mapping[str, str] | None:
        """What the patterns that are found name, the first one's words first; None if none is found."""
        found = [match for pattern in self.match if (match := re.search(pattern, text))]
        named = [group for match in reversed(found) for group in match.groupdict().items()]
        return {name: value for name, value in named if value} if found else None


@dataclass(frozen=True, slots=True)
class Finding:
    """What one diagnostic means; ``import_id`` is that of what already exists."""

    failure: Failure
    transient: bool = False
    import_id: str = ""


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in their order."""
    return TypeAdapter(tuple[Rule, ...]).validate_python(YAML(typ="safe").load(_RULES))


def explaining(place: Place) -> Explain:
    """For ``Terraform(explain=…)``: what was being done and its diagnostics -> the error."""

    def explain(what: str, diagnostics: tuple[Diagnostic, ...]) -> TerraformError:
        findings = [(diagnostic.address, diagnose(diagnostic, place)) for diagnostic in diagnostics]
        return _error(what, place, findings)

    return explain


def diagnose(diagnostic: Diagnostic, place: Place) -> Finding:
    """The meaning of one; what no rule knows is shown whole."""
    text = " ".join(diagnostic.text.split())
    host = place.host_of(diagnostic.address)
    for rule in rules():
        if (groups := rule.groups(text)) is not None:
            return _finding(rule, groups, place, host)
    where = f" ({diagnostic.address})" if diagnostic.address else ""
    fix = "look up what Google's provider says; what was made stays, and the next run goes on from there"
    return Finding(Failure(_UNKNOWN, f"{diagnostic.text.strip()}{where}", host, "provision", fix))


def _finding(rule: Rule, groups: Mapping[str, str], place: Place, host: str | None) -> Finding:
    here = {"project": place.project, "zone": place.zone, "region": place.region}
    words = _Words({**here, **groups})
    transient = rule.transient or (rule.code == "api-off" and place.enables_apis)
    failure = Failure(
        code=rule.code,
        cause=rule.cause.format_map(words),
        host=host,
        phase="provision",
        fix=rule.fix.format_map(words),
        retryable=transient or rule.later,
    )
    return Finding(failure, transient, _import_id(groups, place) if rule.code == _TAKEN else "")


def _import_id(groups: Mapping[str, str], place: Place) -> str:
    """The id by which Terraform imports what is there already; empty where the text does not say it."""
    if "account" in groups:
        return _OWN_ACCOUNT.format_map({"project": place.project, **groups})
    if "role" in groups:
        return f"{groups['role_in']}/roles/{groups['role']}"
    return groups.get("taken", "")


class _Words(dict[str, "_Word"]):
    """The values of `{name}` and `{name:what to say where it is not known}`."""

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__({name: _Word(value) for name, value in known.items()})

    def __missing__(self, name: str) -> _Word:
        return _Word("")


class _Word(str):
    def __format__(self, otherwise: str) -> str:
        return str(self) or otherwise


def _error(what: str, place: Place, findings: Sequence[tuple[str, Finding]]) -> TerraformError:
    failures = tuple(dict.fromkeys(finding.failure for _, finding in findings))
    error = TerraformError(
        what,
        where=f"project {place.project}, {place.zone}",
        why="; ".join(_causes(failures)),
        fix="; ".join(dict.fromkeys(failure.fix for failure in failures)),
        failures=failures,
    )
    error.transient = bool(findings) and all(finding.transient for _, finding in findings)
    error.already_exists = {
        address: found.import_id for address, found in findings if address and found.import_id
    }
    return error


def _causes(failures: Iterable[Failure]) -> list[str]:
    """Each cause once, after the hosts that it is the cause of."""
    hosts: dict[str, list[str]] = {}
    for failure in failures:
        hosts.setdefault(failure.cause, []).extend([failure.host] if failure.host else [])
    return [f"{_some(named)}: {cause}" if named else cause for cause, named in hosts.items()]


def _some(hosts: Sequence[str]) -> str:
    more = len(hosts) - _NAMED
    return ", ".join(hosts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
