"""Clusters that a benchmark raises, in a home of its own, and takes down again."""

from __future__ import annotations

import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterctl.providers.local.layout import machine_name
from clusterctl.providers.local.machine import cgroup_members

BIN = Path(sys.executable).parent
PLAIN = Path(__file__).with_name("plain.py")
SPEC = """\
version: 1
name: {name}
provider: {{type: local{provider}}}
partitions:
  - {{name: train, nodes: {nodes}{partition}}}
"""


@dataclass(frozen=True)
class Cluster:
    """One cluster's spec file, and how clusterctl is called for it. ``folder`` is free for
    files.
    """

    name: str
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def new(
        cls,
        folder: str,
        nodes: int,
        *,
        name: str = "",
        provider: str = "",
        partition: str = "",
        more: str = "",
        **environ: str,
    ) -> Cluster:
        """``provider`` and ``partition`` are added to their settings, ``more`` are lines of the
        spec.
        """
        name = name or f"b{secrets.token_hex(3)}"
        Path(folder, "cluster.yaml").write_text(
            SPEC.format(name=name, nodes=nodes, provider=provider, partition=partition) + more
        )
        return cls(
            name, Path(folder), {**os.environ, "CLUSTERCTL_HOME": f"{folder}/home", **environ}
        )

    @property
    def workspace(self) -> Path:
        return self.folder / "home" / self.name

    @property
    def controller(self) -> str:
        return f"{self.name}-ctl"

    def run(
        self, *words: str | Path, program: tuple[str | Path, ...] = (BIN / "clusterctl",)
    ) -> Any:
        """A verb's answer under `-o json`."""
        argv = [*program, "-o", "json", "-f", self.folder / "cluster.yaml", *words]
        done = subprocess.run(
            argv, env=self.environ, cwd=self.folder, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, argv))}\n{done.stderr.decode()[-3000:]}")
        return json.loads(done.stdout)

    def up(self, *, plain: bool = False) -> Mapping[str, float]:
        """Raise it; seconds by phase. ``plain``: with Ansible's own linear strategy."""
        program = (BIN / "python", PLAIN) if plain else (BIN / "clusterctl",)
        return {p["phase"]: p["seconds"] for p in self.run("up", program=program)["phases"]}

    def down(self) -> None:
        self.run("down", "--yes", "--discard")

    def memory_mib(self) -> float:
        """Of a compute node, by median: its processes, with their parts of what they share
        (PSS).
        """
        machines = machine_name((self.workspace / "id").read_text().strip(), 0).removesuffix("000")
        used: dict[str, int] = {}
        for pid, name in cgroup_members():
            if name.startswith(machines):
                with suppress(OSError):  # it has ended
                    found = re.search(
                        r"^Pss: +(\d+) kB",
                        Path(f"/proc/{pid}/smaps_rollup").read_text(),
                        re.MULTILINE,
                    )
                    used[name] = used.get(name, 0) + (int(found[1]) if found else 0)
        return statistics.median(used.values()) / 1024

    def ssh(
        self, *words: str, user: str = "hpc", host: str = "", stdin: bytes | None = None
    ) -> str:
        """Plain ssh with the file that clusterctl wrote; a connection of its own."""
        argv = [
            "ssh",
            "-F",
            self.workspace / "ssh_config",
            "-l",
            user,
            host or self.controller,
            *words,
        ]
        done = subprocess.run(argv, input=stdin or b"", capture_output=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{words}: {done.stderr.decode()}")
        return done.stdout.decode()


@contextmanager
def raised(nodes: int, more: str = "", name: str = "", *, partition: str = "") -> Iterator[Cluster]:
    """Create a cluster, and remove it afterwards. name: its name. Empty: a random name."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
        cluster = Cluster.new(folder, nodes, more=more, name=name, partition=partition)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
