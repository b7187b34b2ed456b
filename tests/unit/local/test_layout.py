"""The messages between the local provider and its helper, and the record of a cluster."""

import pytest
from pydantic import ValidationError

from clusterctl.providers.local.layout import BakeRequest, ClusterState, numbered

KEY = "ssh-ed25519 AAAAC3Nz clusterctl"
BAKE = {
    "key": "0" * 16,
    "base_key": "1" * 16,
    "distribution": "debian-13",
    "mirror": "http://deb.debian.org/debian",
    "admin_key": KEY,
}
STATE = {"id": "a1b2c3", "name": "demo", "owner": 1000, "workspace": "/w", "image": "0" * 16}


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
    ("field", "value"),
    [
        ("key", "../../etc"),
        ("base_key", "0" * 15),
        ("mirror", "file:///etc"),
        ("mirror", "http://x/ bookworm main\ndeb http://y/"),
        ("distribution", "rocky-9 --repofrompath=x,file:///"),
        ("admin_key", 'command="id" ssh-ed25519 AAAA'),
        ("admin_key", f"{KEY}\n{KEY}"),
    ],
)
def test_helper_refuses_unknown_fields_in_bake_requests(field: str, value: str) -> None:
    BakeRequest.model_validate(BAKE)
    with pytest.raises(ValidationError):
        BakeRequest.model_validate(BAKE | {field: value})


def test_record_of_an_older_version_is_read() -> None:
    state = ClusterState.model_validate({**STATE, "subnet": "10.1.2.0/24", "colour": "red"})
    assert state.numbers == {}
