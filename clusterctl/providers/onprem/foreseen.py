"""What `up` would do to machines that are new to the cluster, in words. `down` takes all of it back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from clusterctl.hosts.report import HostFacts
from clusterctl.hosts.role_files import role_files, role_packages
from clusterctl.providers.onprem.members import Member, distribution
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec


def foreseen(
    spec: ClusterSpec, asked: Sequence[Member], facts: Mapping[str, HostFacts], new: Collection[str]
) -> tuple[str, ...]:
    """A line for all machines that it is the same for."""
    said: dict[str, list[str]] = {}
    for one in asked:
        if one.name in new:
            for text in _of(spec, one, facts[one.name]):
                said.setdefault(text, []).append(one.name)
    return tuple(f"{', '.join(names)}: {text}" for text, names in said.items())


def _of(spec: ClusterSpec, one: Member, facts: HostFacts) -> Iterator[str]:
    packages = role_packages(spec, one.roles, distribution_of(distribution(facts)))
    if missing := [name for name in packages if name not in facts.packages]:
        yield f"to be installed, with what they need: {', '.join(missing)}"
    if missing := [user.name for user in spec.users if user.name not in facts.accounts]:
        yield f"users to be made: {', '.join(missing)}"
    patterns = role_files(spec, one.roles)
    if theirs := [file for file in facts.files if any(fnmatchcase(file, pattern) for pattern in patterns)]:
        yield f"may be changed, kept aside, and put back by `down`: {', '.join(theirs)}"
