"""What is read of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterctl.providers.gcp.terraform import SENSITIVE, UNKNOWN, Plan, read_changes


def shown(change: dict[str, Any], **more: Any) -> dict[str, Any]:
    resource = {"address": "a.b", "mode": "managed", "type": "a", "name": "b", **more}
    return {"resource_changes": [{**resource, "change": {"actions": ["create"], "before": None, **change}}]}


def test_what_is_sensitive_is_masked_wherever_it_stands() -> None:
    after = {
        "pin": 4242,
        "token": "s3cret",
        "list": ["a", "b"],
        "url": "https://u:s3cret@host",
        "block": [{"x": "y"}],
    }
    marks = {"pin": True, "token": True, "list": [False, True], "block": [{"x": True}]}
    (change,) = read_changes(shown({"after": after, "after_sensitive": marks}))
    assert change.after == {
        "pin": SENSITIVE,
        "token": SENSITIVE,
        "list": ["a", SENSITIVE],
        "url": SENSITIVE,
        "block": [{"x": SENSITIVE}],
    }


def test_what_is_not_known_yet_is_said_so() -> None:
    change = {
        "after": {"name": "n", "disk": [{"size": 10}]},
        "after_unknown": {"id": True, "disk": [{"uri": True}]},
    }
    (read_,) = read_changes(shown(change))
    assert read_.after == {"name": "n", "id": UNKNOWN, "disk": [{"size": 10, "uri": UNKNOWN}]}


def test_the_kinds_of_change() -> None:
    for actions, action in {
        ("no-op",): "no-op",
        ("update",): "update",
        ("delete", "create"): "replace",
        ("create", "delete"): "replace",
        ("forget",): "no-op",
    }.items():
        (change,) = read_changes(shown({"actions": list(actions), "before": {}, "after": {}}))
        assert change.action == action
    assert read_changes(shown({"after": {}}, mode="data")) == ()
    (deposed,) = read_changes(shown({"actions": ["delete"], "before": {}, "after": None}, deposed="1a2b"))
    assert deposed.address == "a.b (deposed 1a2b)"
    (adopted,) = read_changes(shown({"actions": ["no-op"], "after": {}, "importing": {"id": "x/y"}}))
    assert adopted.adopts == "x/y"


def test_a_set_with_parts_unknown_has_no_order() -> None:
    """As of a firewall rule for two accounts, of which one was taken over, and so is known first."""

    def planned(*accounts: str | bool) -> Plan:
        known = [None if one is True else one for one in accounts]
        marks = [one is True for one in accounts]
        change = {"after": {"accounts": known}, "after_unknown": {"accounts": marks}}
        return Plan(Path("plan.tfplan"), "", read_changes(shown(change)))

    assert planned(True, "b").beyond(planned("b", "a")) == ()
    assert planned(True, "b").beyond(planned("a", "c"))
    # The order counts where all was known.
    assert planned("a", "b").beyond(planned("b", "a"))


def test_what_is_taken_over_unchanged_is_what_was_shown() -> None:
    """However Google writes it: links in full."""
    asked, there = {"network": "lan"}, {"network": "https://www.googleapis.com/compute/v1/lan"}
    first = Plan(Path("plan.tfplan"), "", read_changes(shown({"after": asked})))
    change = {"actions": ["no-op"], "before": there, "after": there}
    left = [
        read_changes(shown(change | more)) for more in ({"importing": {"id": "x/y"}}, {"actions": ["update"]})
    ]
    assert [first.beyond(Plan(Path("plan.tfplan"), "", each)) for each in left] == [(), left[1]]
