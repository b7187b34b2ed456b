"""The switches of a cluster's fast network, as declared: Slurm then keeps a job below as few as it can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from clusterctl.spec import plain
from clusterctl.spec.base import Model
from clusterctl.spec.finding import Finding
from clusterctl.spec.host_range import expand
from clusterctl.spec.plain import Plain
from clusterctl.spec.words import did_you_mean, shown

_SWITCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def _is_range(text: str) -> str:
    expand(text)
    return text


def _is_name(text: str) -> str:
    if not _SWITCH_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no switch's name: at most 63 letters, digits, dashes or underscores")
    return text


_Range = Annotated[str, AfterValidator(_is_range)]
SwitchName = Annotated[str, AfterValidator(_is_name)]


class Switch(Model):
    """One switch, and what is plugged into it."""

    hosts: _Range | None = Field(None, description="the nodes at this switch, such as gpu[01-08]")
    switches: _Range | None = Field(None, description="the switches at this one, such as leaf[1-4]")


def findings(spec: Plain, expanded: Callable[[object], tuple[str, ...]]) -> Iterator[Finding]:
    """What is wrong with ``provider.fabric``. ``expanded`` gives the names of a range, none if malformed."""
    fabric = plain.mapping(plain.mapping(spec, "provider"), "fabric")
    switches = {str(name): said if isinstance(said, Mapping) else {} for name, said in fabric.items()}
    nodes = {host for p in plain.entries(spec, "partitions") for host in expanded(p.get("hosts"))}
    placed: dict[str, str] = {}
    for kind, known, what in (("hosts", nodes, "node"), ("switches", set(switches), "switch")):
        placed.clear()
        for name, said in switches.items():
            at = ("provider", "fabric", name, kind)
            for one in expanded(said.get(kind)):
                if known and one not in known:
                    yield Finding(at, f"there is no {what} {shown(one)}", did_you_mean(one, known))
                elif one in placed:
                    yield Finding(at, f"{one} is at {placed[one]} already", f"a {what} is at one switch")
                placed.setdefault(one, name)
        if kind == "hosts" and switches and (left := sorted(nodes - set(placed))):
            message = f"{', '.join(left[:3])}{' and more' if len(left) > 3 else ''}: at no switch"  # noqa: PLR2004
            yield Finding(
                ("provider", "fabric"), message, "name every node, or leave fabric out", at_key=True
            )
    yield from _shape(switches, placed)


def _shape(switches: Mapping[str, Plain], above: Mapping[str, str]) -> Iterator[Finding]:
    """Each switch has something at it, of one kind, and none is above itself."""
    for name, said in switches.items():
        at = ("provider", "fabric", name)
        if (said.get("hosts") is None) == (said.get("switches") is None):
            hint = "write hosts: RANGE of a switch with nodes, switches: RANGE of one above others"
            yield Finding(at, "a switch has either hosts or switches", hint, at_key=True)
        seen, upward = {name}, above.get(name)
        while upward is not None and upward not in seen:
            seen.add(upward)
            upward = above.get(upward)
        if upward == name:
            yield Finding(at, f"{name} is above itself", "a fabric is a tree", at_key=True)
