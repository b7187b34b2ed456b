"""Where the artifacts of a store of MLflow are on this machine. tests/integration/cli/
test_cli_sync_sweep.py has the real MLflow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.util.mlflow_copy import local_folder

JOB = "/shared/home/ada/clusterctl/jobs/mine-1"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        (f"{JOB}/files/mlruns/1/ab/artifacts", "mlruns/1/ab/artifacts"),
        (f"file://{JOB}/files/mlruns/a%20b/artifacts", "mlruns/a b/artifacts"),
        (f"{JOB}/task-1/mlruns/artifacts", "task-1/mlruns/artifacts"),
        (f"{JOB}/files/../../../../etc", None),
        (f"{JOB}/files/out", None),
        ("/etc", None),
        ("s3://bucket/1/ab/artifacts", None),
    ],
)
def test_local_folder_is_only_in_the_run(uri: str, path: str | None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "out").symlink_to("/etc")
    moved = [(f"{JOB}/files", str(run)), (JOB, str(run))]
    assert local_folder(uri, moved) == (str(run / path) if path else None)
