"""The role tuning raises kernel settings and never lowers them."""

from __future__ import annotations

from pathlib import Path

from tests.support.plays import program, run_tasks


def tune(tmp_path: Path, found: str) -> tuple[dict[str, str], list[str]]:
    """Run the role on a kernel with these settings. Return (the settings in its file, the calls of
    sysctl).
    """
    (tmp_path / "found").write_text(found)
    calls = tmp_path / "calls"
    program(
        tmp_path,
        "sysctl",
        f'case "$*" in *--load*) echo "$*" >>{calls};; *) cat {tmp_path}/found;; esac',
    )
    drop_in = tmp_path / "90-clusterctl.conf"
    files = {"tuning_sysctl_file": str(drop_in), "tuning_limits_file": str(tmp_path / "limits")}
    done = run_tasks(tmp_path, "tuning", "configure", **files)
    assert done.returncode == 0, done.stdout
    lines = (
        line.split(" = ") for line in drop_in.read_text().splitlines() if not line.startswith("#")
    )
    return dict(lines), calls.read_text().splitlines() if calls.exists() else []


def test_tuning_role_raises_and_loads_low_limits(tmp_path: Path) -> None:
    found, calls = tune(tmp_path, "net.core.rmem_max = 212992\nnet.core.somaxconn = 4096\n")
    assert found == {"net.core.rmem_max": "16777216", "net.core.somaxconn": "4096"}
    assert calls == [f"--ignore --quiet --load={tmp_path}/90-clusterctl.conf"]
    assert (tmp_path / "limits").read_text().split() == ["*", "soft", "nofile", "65536"]


def test_tuning_role_keeps_higher_limits(tmp_path: Path) -> None:
    found, calls = tune(tmp_path, "net.core.rmem_max = 536870912\nnet.core.wmem_max = 536870912\n")
    assert found == {"net.core.rmem_max": "536870912", "net.core.wmem_max": "536870912"}
    assert calls == []
