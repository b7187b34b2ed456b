"""Names that hold without any spec: of spec files, of what is ours on hosts; and what is near to a name."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError

DATA: Final = Path(__file__).with_name("data")
SPEC_NAME: Final = "cluster.yaml"
DEFAULT_CLUSTER: Final = "local"  # what there is without a file
ADMIN_USER: Final = "clusterctl"
SYSTEM_ACCOUNTS: Final = ("slurm", "munge")  # of the daemons; the role `users` makes them
PROOF_PARTITION: Final = "clusterctl-proof"
ROOT: Final = "/opt/clusterctl"  # on hosts that clusterctl configures, with what jobs use
SLURMCTLD_PORT, SLURMD_PORT, SLURMDBD_PORT = 6817, 6818, 6819
MPI_SSH_FOLDER: Final = "/etc/clusterctl/mpi"  # of the role mpi_ssh
MPI_SSH: Final = f"ssh -F {MPI_SSH_FOLDER}/ssh_config"  # from host to host, as a job user
MAX_COUNT: Final = 65_533  # Slurm counts nodes, tasks and CPUs of a node in 16 bits


class Launcher(StrEnum):
    """How ranks are started: ``srun`` speaks PMIx, ``mpirun`` gets a hostfile; ``torchrun`` is PyTorch's."""

    SRUN = "srun"
    MPIRUN = "mpirun"
    TORCHRUN = "torchrun"


def is_cluster_name(text: str) -> bool:
    """Whether a cluster can have this name, as the models of specs say, which take long to import."""
    pattern, _ = tomllib.loads((DATA / "patterns.toml").read_text(encoding="utf-8"))["label"]
    return re.fullmatch(pattern, text) is not None


def find_spec(start: Path) -> Path | None:
    """The spec file of a folder, if it has one. Whether it can be read is seen on reading."""
    path = start / SPEC_NAME
    return path if path.exists() or path.is_symlink() else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean nodes?`` when a known word is near, else an empty text."""
    candidates = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), candidates, n=1)
    return f"did you mean {candidates[near[0]]}?" if near else ""


def reject_unknown(
    names: Iterable[str], known: Collection[str], what: str, otherwise: str = "", where: str = ""
) -> None:
    """That all of these are known. ``otherwise`` is what to do where none of the known is near.

    Raises:
        UsageError: one is not.
    """
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or otherwise or f"known are {', '.join(sorted(known)) or 'none'}"
            raise UsageError(f"{what} {name!r}", code="unknown-name", where=where, fix=hint)
