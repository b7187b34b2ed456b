"""The messages between the local provider and its helper, and the record of a cluster."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from clusterctl.providers.local import layout
from clusterctl.providers.local.helper import VERBS
from clusterctl.providers.local.layout import ClusterState, numbered

KEY = "ssh-ed25519 AAAAC3Nz clusterctl"
BAKE = {
    "key": "0" * 16,
    "base_key": "1" * 16,
    "distribution": "debian-13",
    "mirror": "http://deb.debian.org/debian",
    "admin_key": KEY,
}
STATE = {"id": "a1b2c3", "name": "demo", "owner": 1000, "workspace": "/w", "image": "0" * 16}
ID = {"id": "a1b2c3"}
# A verb of the helper -> its kind of message, and one that it accepts.
ASKED: Mapping[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "bake": (layout.BakeRequest, BAKE),
    "bake_class": (
        layout.ClassRequest,
        {**ID, "image": "0" * 16, "inputs": {"ctl": "1" * 16}, "admin_key": KEY},
    ),
    "up": (
        layout.ClusterRequest,
        {**STATE, "distribution": "debian-13", "admin_key": KEY, "nodes": [{"name": "ctl"}]},
    ),
    "down": (layout.ClusterQuery, ID),
    "existing": (layout.ClusterQuery, ID),
    "look": (layout.ClusterQuery, ID),
    "storage": (layout.StorageQuery, {"owner": 1000}),
    "cache": (layout.CacheQuery, {}),
    "clusters": (layout.NoQuery, {}),
    "kill_host": (layout.HostQuery, {**ID, "host": "ctl"}),
    "signal_ranks": (layout.SignalRequest, {**ID, "job": "1", "number": 9, "last": False}),
}


def test_nodes_are_numbered_in_order() -> None:
    assert numbered(["ctl", "a-1", "b-1"], {}) == {"ctl": 1, "a-1": 2, "b-1": 3}


def test_numbered_keeps_numbers_when_an_earlier_partition_grows() -> None:
    before = numbered(["ctl", "a-1", "b-1"], {})
    assert numbered(["ctl", "a-1", "a-2", "b-1"], before) == {
        "ctl": 1,
        "a-1": 2,
        "a-2": 4,
        "b-1": 3,
    }


def test_numbered_reuses_the_number_of_a_removed_node() -> None:
    before = numbered(["ctl", "a-1", "a-2", "b-1"], {})
    shrunk = numbered(["ctl", "a-1", "b-1"], before)
    assert shrunk == {"ctl": 1, "a-1": 2, "b-1": 4}
    assert numbered(["ctl", "a-1", "b-1", "b-2"], shrunk)["b-2"] == 3


@pytest.mark.parametrize(
    ("verb", "changes"),
    [
        ("bake", {"key": "../../etc"}),
        ("bake", {"base_key": "0" * 15}),
        ("bake", {"mirror": "file:///etc"}),
        ("bake", {"mirror": "http://x/ bookworm main\ndeb http://y/"}),
        ("bake", {"distribution": "rocky-9 --repofrompath=x,file:///"}),
        ("bake", {"admin_key": 'command="id" ssh-ed25519 AAAA'}),
        ("bake", {"admin_key": f"{KEY}\n{KEY}"}),
        ("bake", {"hook": "/tmp/x"}),
        ("bake_class", {"inputs": {"../ctl": "0" * 16}}),
        ("bake_class", {"inputs": {"ctl": "/etc"}}),
        ("up", {"id": "../../x"}),
        ("up", {"nodes": [{"name": "-train"}]}),
        ("up", {"nodes": [{"name": "a/b"}]}),
        ("up", {"nodes": [{"name": "a", "cores": ["0; id"]}]}),
        ("up", {"homes": [{"name": "root:x", "uid": 1000, "keys": []}]}),
        ("up", {"homes": [{"name": "eve", "uid": 0, "keys": []}]}),
        ("up", {"packages": ["git; id"]}),
        ("up", {"packages": ["--allow-unauthenticated"]}),
        ("up", {"storage": "/etc"}),
        ("down", {"id": "a1b2c3\n"}),
        ("down", {"folder": "/etc"}),
        ("existing", {"id": "*"}),
        ("look", {"id": ""}),
        ("storage", {"remove": "../.."}),
        ("storage", {"owner": "../0"}),
        ("cache", {"prune": "yes please"}),
        ("cache", {"folder": "/var"}),
        ("clusters", {"owner": 0}),
        ("kill_host", {"host": "../1"}),
        ("signal_ranks", {"job": "-1"}),
        ("signal_ranks", {"number": 0}),
    ],
)
def test_helper_refuses_messages_that_clusterctl_never_sends(
    verb: str, changes: dict[str, Any]
) -> None:
    kind, asked = ASKED[verb]
    kind.model_validate(asked)
    with pytest.raises(ValidationError):
        VERBS[verb](asked | changes)


def test_each_verb_of_the_helper_has_a_kind_of_message() -> None:
    assert {*ASKED} == {*VERBS}


def test_record_of_an_older_version_is_read() -> None:
    state = ClusterState.model_validate({**STATE, "subnet": "10.1.2.0/24", "colour": "red"})
    assert state.numbers == {}
