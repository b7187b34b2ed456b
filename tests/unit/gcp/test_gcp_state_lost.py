"""What Terraform made is found and removed without its state: by Google's API alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.orphans import find_resources, orphan_ids, remove_resources
from clusterctl.providers.gcp.provider import variables
from clusterctl.util.progress import Clock
from tests.support.google.api import Google
from tests.unit.gcp.clusters import NOT_BILLED
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY, Module, spec_of


def test_a_cluster_whose_state_was_lost_is_removed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, spec = Module(tmp_path), spec_of("everything")
    module.set(variables(spec, CLUSTER_ID, PUBLIC_KEY))
    module.apply()
    (module.path / "terraform.tfstate").unlink()
    made = {kind for kind in module.cloud.resources().values() if "iam_member" not in kind}
    assert spec.provider.type == "gcp"
    with Google(module.cloud.store, spec.provider.project) as google:
        for key, value in google.environment.items():
            monkeypatch.setenv(key, value)
        api = Api(spec.provider.project, clock=Clock(sleep=lambda _: None))
        assert orphan_ids(api, spec.name) == (CLUSTER_ID,)
        found = find_resources(api, CLUSTER_ID)
        assert len({one.kind for one in found}) >= len(made - NOT_BILLED)
        remove_resources(api, found, report=lambda _: None)
        assert find_resources(api, CLUSTER_ID) == ()
        assert not google.violations
    left = set(module.cloud.resources().values())
    assert left <= NOT_BILLED
