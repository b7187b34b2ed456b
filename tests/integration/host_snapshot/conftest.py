"""The parts of the snapshot's module, as in its unit tests."""

from tests.unit.host_snapshot.conftest import util, utils  # noqa: F401
