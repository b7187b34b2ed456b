"""The fixtures of the unit tests that import the parts of host_changes."""

from tests.unit.host_changes.conftest import util, utils  # noqa: F401
