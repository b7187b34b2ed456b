"""The script that collects the facts of a host, run by real shells."""

from __future__ import annotations

from pathlib import Path

from clusterctl.hosts.probe import NODE_ARGV
from tests.support.local_transport import LocalTransport


def test_facts_script_runs_in_any_shell_without_optional_tools() -> None:
    result = LocalTransport().run(NODE_ARGV)
    sections = [line for line in result.stdout.splitlines() if line.startswith("@")]
    assert sections == ["@node", "@gpus", "@mpi"]
    assert result.stderr == ""


def test_facts_script_does_not_run_slurmd_for_a_known_size(tmp_path: Path) -> None:
    (tmp_path / "slurmd").write_text("#!/bin/sh\necho CPUs=2\n")
    (tmp_path / "slurmd").chmod(0o755)
    with_slurmd = [NODE_ARGV[0], "-c", f"PATH={tmp_path}:$PATH; {NODE_ARGV[-1]}"]
    for words, first in (((), "CPUs=2"), (("sh", "known"), "absent")):
        lines = LocalTransport().run([*with_slurmd, *words]).stdout.splitlines()
        assert lines[:2] == ["@node", first]
