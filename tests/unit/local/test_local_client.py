"""The local provider says where it can't run before it starts anything."""

import sys

import pytest

from clusterctl.errors import MachineError
from clusterctl.providers.local.client import elevation


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_another_system_than_linux_is_refused(platform: str) -> None:
    with pytest.raises(MachineError, match="the local provider needs Linux") as caught:
        elevation(platform)
    assert platform in caught.value.where
    assert "Linux machine" in caught.value.fix


def test_this_machine_is_taken() -> None:
    assert elevation(sys.platform) in ([], ["sudo", "-n", "--"])
