"""Test of the record of an attached cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.providers.existing.attach import _inventory
from clusterctl.providers.existing.probe import Probed
from clusterctl.providers.existing.prove import Unproven
from clusterctl.spec.common import Partition
from clusterctl.spec.existing import ExistingSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher
from tests.unit.existing.test_prove import PLACED, SITE


@pytest.mark.parametrize(
    ("launcher", "pmix"), [(Launcher.MPIRUN, False), (Launcher.SRUN, True), (None, True)]
)
def test_earlier_launcher_stays_without_a_new_proof(launcher: Launcher | None, pmix: bool) -> None:
    settings = ExistingSettings(type="existing", login="campus", folder="/home/ada/ours", launcher=launcher)
    partitions = (Partition(name="short", nodes=2),)
    spec = ClusterSpec(version=1, name="campus", provider=settings, partitions=partitions)
    probed = Probed(replace(SITE, mpi_types=("pmix",)), "", "short", ())
    assert _inventory(spec, probed, PLACED, Unproven("pending", "Resources")).pmix is pmix
