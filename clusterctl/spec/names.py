"""Names that do not depend on a spec: files, accounts, folders, ports; suggestions for misspelt
names.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError

DATA: Final = Path(__file__).with_name("data")
SPEC_NAME: Final = "cluster.yaml"
# A folder with one of these files is the root of a project.
PROJECT_FILES: Final = (
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "requirements.txt",
    "environment.yml",
    "environment.yaml",
    ".git",
)
# The name of the cluster without a spec file.
DEFAULT_CLUSTER: Final = "local"
ADMIN_USER: Final = "clusterctl"
# The uid and gid of the admin account, outside the ranges that Debian, EL and `users` give to
# people.
ADMIN_ID: Final = 64100
# The accounts of the daemons, which the role `users` creates.
SYSTEM_ACCOUNTS: Final = ("slurm", "munge")
PROOF_PARTITION: Final = "clusterctl-proof"
# The account, in Slurm's accounting, of the verification job.
PROOF_ACCOUNT: Final = "clusterctl"
# Memory that the verification job gets on each node.
PROOF_MEMORY_MIB: Final = 64
# The folder on hosts with the software for jobs.
ROOT: Final = "/opt/clusterctl"
# The folder with the job user's files of clusterctl, below the home.
FOLDER: Final = "clusterctl"
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SLURMDBD_PORT = 6819
# Ports of nodes. No program listens on the first, so a running host refuses connections of the
# controller. On the second, the controller asks to kill the processes of lost jobs.
ALIVE_PORT = 6815
FENCE_PORT = 6816
# The role mpi_ssh creates this folder. Job users connect from host to host with MPI_SSH.
MPI_SSH_FOLDER: Final = "/etc/clusterctl/mpi"
MPI_SSH: Final = f"ssh -F {MPI_SSH_FOLDER}/ssh_config"
# A /24 has 256 addresses. Reserved: network, broadcast, this machine, and a few spare addresses.
MAX_LOCAL_HOSTS: Final = 250
# Slurm stores numbers of nodes, tasks and CPUs of a node in 16 bits.
MAX_COUNT: Final = 65_533
# The variable with the folder of an earlier run's files on the cluster.
FROM_RUN: Final = "CLUSTERCTL_FROM_RUN"
# The variables with the folders of the files of the jobs that --after names: this and 1, 2, ...
AFTER: Final = "CLUSTERCTL_AFTER_"
# The variable of --secret with the addresses to which payload/node/messages.py sends messages.
NODE_RECEIVERS: Final = "CLUSTERCTL_NOTIFY"
# The container engines that run images of jobs, the preferred one first, and those that run .sif
# files. payload/node/images.py has the same names.
SIF_ENGINES: Final = ("apptainer", "singularity")
ENGINES: Final = (*SIF_ENGINES, "enroot", "ch-run")
# What helps if a cluster is broken: of clusterctl itself, and of other people.
RUN_UP: Final = "run `clusterctl up`"
ASK_OPERATORS: Final = "ask the site's administrators"
# The indices of job arrays are lower, on clusters of `up`: Slurm's MaxArraySize. MaxJobCount counts
# each task of an array.
MAX_ARRAY_SIZE: Final = 100_001
MAX_JOB_COUNT: Final = 500_000


class Topic(StrEnum):
    """The heading of an option in the help of a command with many options."""

    SIZE = "Size"
    PLACE = "Place"
    PROGRAM = "Program"
    MANY = "Many jobs"
    RESTARTS = "Restarts"
    WATCH = "Watch"
    BUNDLED = "Bundled jobs"
    MORE = "More"


class LocalValue(StrEnum):
    """What a value of an option or argument has of the user's machine.

    PATH: a path. WRITTEN: a folder to write. NAME: a path, if it is not a name such as `train` or a
    job ID. PACKAGES: a path, before [EXTRA]. SECRET: a path after `=`, or the name of a variable.
    TABLE: a path, if it has no `=`. IMAGE: a path, if it has no `://`. VARIABLE: without `=`, a
    variable. HERE_FIRST, HERE_LAST: paths, all but the last or only the last of several values.
    """

    PATH = "path"
    WRITTEN = "written"
    NAME = "name"
    PACKAGES = "packages"
    SECRET = "secret"  # noqa: S105 - not one
    TABLE = "table"
    IMAGE = "image"
    VARIABLE = "variable"
    HERE_FIRST = "here-first"
    HERE_LAST = "here-last"

    @property
    def words(self) -> str:
        """What it is, for the manual."""
        return _OF_LOCAL.get(self, "path on this machine")

    @property
    def is_path(self) -> bool:
        """Whether a shell may complete each value as a path."""
        return self not in {LocalValue.SECRET, LocalValue.TABLE, LocalValue.VARIABLE}


_OF_LOCAL: Final = {
    LocalValue.NAME: "name, or path on this machine",
    LocalValue.SECRET: "secret: path on this machine, or variable of yours",
    LocalValue.TABLE: "values, or path on this machine",
    LocalValue.IMAGE: "image, or path",
    LocalValue.VARIABLE: "value, or variable of yours",
    LocalValue.HERE_FIRST: "the last on the cluster, the others on this machine",
    LocalValue.HERE_LAST: "the last on this machine, the others on the cluster",
}


class Launcher(StrEnum):
    """The program that starts ranks: ``srun`` with PMIx, ``mpirun`` with a hostfile, or
    ``torchrun``.
    """

    SRUN = "srun"
    MPIRUN = "mpirun"
    TORCHRUN = "torchrun"


def is_cluster_name(text: str) -> bool:
    """Return whether this is a valid cluster name, quickly: without importing the spec models."""
    pattern, _ = tomllib.loads((DATA / "patterns.toml").read_text(encoding="utf-8"))["label"]
    return re.fullmatch(pattern, text) is not None


def find_spec(start: Path) -> Path | None:
    """Return the path of the spec file in the folder ``start``, if the file exists, even if
    unreadable.
    """
    path = start / SPEC_NAME
    return path if path.exists() or path.is_symlink() else None


def first_few(names: Sequence[str], most: int = 1) -> str:
    """Return the first ``most`` names as text for a message: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ``did you mean nodes?`` if a known name is similar to the word and begins with the same
    letter, otherwise an empty text.
    """
    first = word.lower().lstrip("-")[:1]
    by_lower_case = {
        name.lower(): name for name in names if name.lower().lstrip("-").startswith(first)
    }
    near = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return f"did you mean {by_lower_case[near[0]]}?" if near else ""


def key_mark(cluster: str) -> str:
    """Return the end of each line about a cluster in a job user's authorized_keys: of the keys that
    the spec lists, and of the comments around all lines that the Ansible role `users` writes there.
    """
    return f" managed by clusterctl for {cluster}"


def is_near(option: str, typed: str) -> bool:
    """Return whether two options are similar apart from their dashes, which all have, and begin with
    the same letter.
    """
    own, other = option.lstrip("-"), typed.lstrip("-")
    return own[:1] == other[:1] and bool(difflib.get_close_matches(other, [own]))


def reject_unknown(
    names: Iterable[str],
    allowed: Collection[str],
    message: str,
    otherwise: str = "",
    where: str = "",
) -> None:
    """Reject names that are not allowed.

    message: the start of the error message, before the wrong name, such as "there is no host".
    otherwise: the fix if no allowed name is similar. Empty: list the allowed names.

    Raises:
        UsageError: a name is not allowed.
    """
    for name in names:
        if name not in allowed:
            allowed_names = f"known names: {', '.join(sorted(allowed)) or '(empty)'}"
            hint = did_you_mean(name, allowed) or otherwise or allowed_names
            raise UsageError(
                f"{message} {name!r}", code="not-found", about="name", where=where, fix=hint
            )
