"""The role tuning: it raises, and never lowers."""

from __future__ import annotations

from pathlib import Path

from tests.support.plays import program, run_tasks


def tune(tmp_path: Path, found: str) -> tuple[dict[str, str], list[str]]:
    """What the drop-in says after the kernel has said what it has; and how sysctl was called to
    load it.
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


def test_what_is_too_little_is_raised_and_put_into_force(tmp_path: Path) -> None:
    found, calls = tune(tmp_path, "net.core.rmem_max = 212992\nnet.core.somaxconn = 4096\n")
    assert found == {"net.core.rmem_max": "16777216", "net.core.somaxconn": "4096"}
    assert calls == [f"--ignore --quiet --load={tmp_path}/90-clusterctl.conf"]
    assert (tmp_path / "limits").read_text().split() == ["*", "soft", "nofile", "65536"]


def test_a_host_that_is_tuned_higher_stays_so(tmp_path: Path) -> None:
    found, calls = tune(tmp_path, "net.core.rmem_max = 536870912\nnet.core.wmem_max = 536870912\n")
    assert found == {"net.core.rmem_max": "536870912", "net.core.wmem_max": "536870912"}
    assert calls == []
