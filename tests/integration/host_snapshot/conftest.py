"""The fixtures of the unit tests that import the parts of the host snapshot."""

from tests.unit.host_snapshot.conftest import util, utils  # noqa: F401
