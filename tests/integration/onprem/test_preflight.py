"""`plan --preflight` finds kept storage of other accounts before anything is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import ProvisionError, UsageError
from tests.support.messages import refused as rejected
from tests.unit.onprem.test_preflight import desk


def test_preflight_reports_kept_storage_of_other_accounts_with_other_errors(tmp_path: Path) -> None:
    spec, workspace, provider = desk(tmp_path)
    report = provider.preflight(spec, workspace)
    assert report is not None
    assert {"address", "kept-storage"} <= {error.code for error in report.errors}
    with pytest.raises(ProvisionError) as caught:
        provider.plan(spec, workspace)
    assert {"address", "kept-storage"} <= {failure.code for failure in caught.value.failures}


def test_kept_storage_of_other_accounts_is_a_spec_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, workspace, provider = desk(tmp_path)
    monkeypatch.setattr("clusterctl.providers.onprem.provider.blocking_findings", lambda *_: ())
    with rejected("storage-users-differ", UsageError):
        provider.plan(spec, workspace)
