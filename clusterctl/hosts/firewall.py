"""Which firewall is in force on a host, and whom it lets in: from what the firewalls' own commands say."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, collapse_addresses, summarize_address_range
from typing import Any, Final, Literal

from clusterctl.hosts.probe import HostFacts

By = Literal["ufw", "iptables", "nftables"]
Interfaces = Mapping[str, Sequence[str]]  # -> its addresses, with their prefix lengths

_ALL: Final = "0.0.0.0/0"
_REFUSALS: Final = frozenset({"drop", "reject"})
# `Anywhere on eth1  ALLOW IN  10.0.0.0/24/tcp  (log) # comment`: whoever comes from there may go to any port.
_UFW_RULE: Final = re.compile(
    r"^(Anywhere|[\d./]+?)(?:/tcp)?(?: on (\S+))? +ALLOW(?: IN)? +(Anywhere|[\d./]+?)(?:/tcp)?"
    r" *(?:\(log[^)]*\))? *(?:#.*)?$",
    re.MULTILINE,
)
_UFW_REFUSES: Final = re.compile(r"^Default: (?:deny|reject) \(incoming\)", re.MULTILINE)
_ELSEWHERE: Final = frozenset({"FORWARD", "OUTPUT"})  # chains of what is not for the host itself
_XTABLES: Final = "ip filter INPUT"  # iptables' chain, which nft shows, too
_NFT_PASSED: Final = frozenset({"accept", "counter", "log"})  # statements that match nothing
_NFT_PROTOCOLS: Final = ("l4proto", "nfproto", "protocol")
_TCP: Final = frozenset({"tcp", "ipv4", "ip"})
_IPTABLES_PASSED: Final = frozenset({"-m", "--comment", "-j"})


@dataclass(frozen=True, slots=True)
class Chain:
    """Drops what no rule of it lets in. ``lets``: the networks of which rules let in all, to any port."""

    by: By
    name: str
    lets: tuple[IPv4Network, ...]

    def keeps_out(self, sources: Iterable[IPv4Network]) -> tuple[IPv4Network, ...]:
        """Those of the sources of which it does not let in all."""
        return tuple(one for one in sources if not any(one.subnet_of(network) for network in self.lets))


@dataclass(frozen=True, slots=True)
class Firewall:
    """The one in force: `firewalld`, `ufw`, `iptables`, `nftables` or `none`.

    ``zone``: firewalld's default. ``closed``: what drops all that no rule lets in, but for firewalld's.
    """

    name: str
    zone: str = ""
    closed: tuple[Chain, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.zone})" if self.zone else self.name

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "zone": self.zone,
            "closed": [chain.name or chain.by for chain in self.closed],
        }


def firewall_of(facts: HostFacts) -> Firewall:
    """The firewall of a host. Rules that refuse nothing in general are none."""
    said = facts.firewall
    if said.firewalld == "running":
        return Firewall("firewalld", said.zone)
    if "Status: active" in said.ufw:
        return Firewall("ufw", closed=tuple(_ufw(said.ufw, facts.interfaces)))
    closed = (
        *_read(_iptables, said.iptables, facts.interfaces),
        *_read(_nftables, said.nft, facts.interfaces),
    )
    if any(chain.by == "iptables" for chain in closed):
        closed = tuple(chain for chain in closed if chain.name != _XTABLES)
    return Firewall(closed[0].by if closed else "none", closed=closed)


def _read(
    reader: Callable[[str, Interfaces], Iterator[Chain]], said: str, interfaces: Interfaces
) -> tuple[Chain, ...]:
    """The chains; none where the words are not understood, which is no reason to do nothing with a host."""
    try:
        return tuple(reader(said, interfaces))
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()


def _ufw(said: str, interfaces: Interfaces) -> Iterator[Chain]:
    if _UFW_REFUSES.search(said):
        lets: list[str] = []
        for target, interface, source in _UFW_RULE.findall(said):
            if target == "Anywhere" or _here([target], interfaces):
                near = _by(interface, interfaces) if interface else [_ALL]
                lets += near if source == "Anywhere" else [source]
        yield Chain("ufw", "", _networks(lets))


def _here(targets: Iterable[str], interfaces: Interfaces) -> bool:
    """Whether an address where others reach the host is among these addresses and networks."""
    own = [IPv4Interface(address).ip for addresses in interfaces.values() for address in addresses]
    return any(one in network for network in _networks(targets) for one in own if not one.is_loopback)


def _by(interface: str, interfaces: Interfaces) -> list[str]:
    """The networks from which packets come in by an interface, such as `eth1` or `eth+`.

    Its own, and all that are at no other interface: they may be routed. By the loopback nobody else comes.
    """
    own: list[IPv4Network] = []
    rest = [IPv4Network(_ALL)]
    for name, addresses in interfaces.items():
        networks = [IPv4Interface(address).network for address in addresses]
        if fnmatchcase(name, interface.replace("+", "*")):
            own += networks
        else:
            rest = [part for one in rest for part in _without(one, networks)]
    routed = [] if all(network.is_loopback for network in own) else rest
    return [str(network) for network in (*own, *routed)]


def _without(whole: IPv4Network, parts: Iterable[IPv4Network]) -> list[IPv4Network]:
    left = [whole]
    for part in parts:
        left = [
            one
            for each in left
            if not each.subnet_of(part)
            for one in (each.address_exclude(part) if part.subnet_of(each) else (each,))
        ]
    return left


def _iptables(said: str, interfaces: Interfaces) -> Iterator[Chain]:
    """INPUT of the table filter, as `iptables-save` writes it."""
    lines = said.partition("*filter\n")[2].partition("COMMIT")[0].splitlines()
    rules = [shlex.split(line)[1:] for line in lines if line.startswith("-A ")]
    refused = any(
        chain == "INPUT" and rest[:2] in (["-j", "DROP"], ["-j", "REJECT"]) for chain, *rest in rules
    )
    if refused or any(line.startswith(":INPUT DROP") for line in lines):
        lets = [
            source
            for chain, *rest in rules
            if chain not in _ELSEWHERE
            for source in _iptables_sources(rest, interfaces)
        ]
        yield Chain("iptables", "INPUT", _networks(lets))


def _iptables_sources(rule: Sequence[str], interfaces: Interfaces) -> Sequence[str]:
    """The networks of which a rule lets in all, such as `-s 10.0.0.0/24 -p tcp -j ACCEPT`."""
    options = dict(zip(rule[::2], rule[1::2], strict=False))
    states = options.pop("--ctstate", None) or options.pop("--state", "NEW")
    narrow = "!" in rule or "NEW" not in states or options.pop("-p", "tcp") not in ("tcp", "all")
    source, interface, target = (options.pop(option, None) for option in ("-s", "-i", "-d"))
    narrow = narrow or (target is not None and not _here([target], interfaces))
    if narrow or options.get("-j") != "ACCEPT" or set(options) - _IPTABLES_PASSED:
        return ()
    near = _by(interface, interfaces) if interface else (_ALL,)
    return (source,) if source else near


def _nftables(said: str, interfaces: Interfaces) -> Iterator[Chain]:
    """The chains at the hook input, as `nft -j list ruleset` has them."""
    tables: defaultdict[tuple[str, str], defaultdict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for listed in json.loads(said)["nftables"] if said else ():
        for kind, one in listed.items():
            if "table" in one:
                tables[one["family"], one["table"]][kind].append(one)
    for (family, table), objects in tables.items():
        named = {f"@{one['name']}": one.get("elem", []) for one in objects["set"]}
        # A rule may lead to any chain that is at no hook: who is let in there, is let in.
        free = {one["name"] for one in objects["chain"] if "hook" not in one}
        for chain in objects["chain"] if family in ("ip", "inet") else ():
            rules = [one["expr"] for one in objects["rule"] if one["chain"] in {chain["name"], *free}]
            own = [one["expr"] for one in objects["rule"] if one["chain"] == chain["name"]]
            refuses = chain.get("policy") == "drop" or any(map(_refuses_all, own))
            if chain.get("hook") == "input" and refuses:
                lets = [source for rule in rules for source in _nft_sources(rule, named, interfaces)]
                yield Chain("nftables", f"{family} {table} {chain['name']}", _networks(lets))


def _refuses_all(rule: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no match comes before its drop or reject."""
    kinds = {kind for statement in rule for kind in statement} - _NFT_PASSED
    return bool(kinds) and kinds <= _REFUSALS


def _nft_sources(
    rule: Sequence[Mapping[str, Any]], named: Mapping[str, Any], interfaces: Interfaces
) -> Sequence[str]:
    """The networks of which a rule lets in all, such as `ip saddr 10.0.0.0/24 accept`."""
    kinds = {kind for statement in rule for kind in statement}
    matches = [statement["match"] for statement in rule if "match" in statement]
    if "accept" not in kinds or kinds - _NFT_PASSED - {"match"}:
        return ()
    if any(match["op"] not in ("==", "in") for match in matches):
        return ()
    wanted = {_nft_key(match["left"]): list(_elements(match["right"], named)) for match in matches}
    states = wanted.pop("state", ["new"])
    source, interface = wanted.pop("saddr", None), wanted.pop("iifname", None) or wanted.pop("iif", None)
    protocols = [wanted.pop(key) for key in _NFT_PROTOCOLS if key in wanted]
    here = _here(wanted.pop("daddr"), interfaces) if "daddr" in wanted else True
    if wanted or not here or "new" not in states or not all(_TCP & set(values) for values in protocols):
        return ()
    if source is None and interface is not None:
        return [network for name in interface for network in _by(name, interfaces)]
    return [_ALL] if source is None else source


def _nft_key(left: Any) -> str:
    """What a match looks at: `saddr` of `{"payload": {"protocol": "ip", "field": "saddr"}}`."""
    match left:
        case {"payload": {"field": str(key)}} | {"meta": {"key": str(key)}} | {"ct": {"key": str(key)}}:
            return key
    return "something else"


def _elements(value: Any, named: Mapping[str, Any]) -> Iterator[str]:
    """What a match compares with, one by one: of a set its elements, of a range of addresses its networks."""
    match value:
        case list():
            yield from (one for each in value for one in _elements(each, named))
        case {"set": inner} | {"elem": {"val": inner}}:
            yield from _elements(inner, named)
        case {"prefix": {"addr": address, "len": length}}:
            yield f"{address}/{length}"
        case {"range": [str(first), str(last)]} if ":" not in first:
            with suppress(ValueError):  # of words, such as days
                yield from map(str, summarize_address_range(IPv4Address(first), IPv4Address(last)))
        case str() if value in named:
            yield from _elements(named[value], named)
        case str():
            yield value


def _networks(texts: Iterable[str]) -> tuple[IPv4Network, ...]:
    """The IPv4 networks among them, halves of one as that one."""
    found = []
    for text in texts:
        with suppress(ValueError):  # of IPv6, or with a mask that is no prefix
            found.append(IPv4Network(text, strict=False))
    return tuple(collapse_addresses(found))
