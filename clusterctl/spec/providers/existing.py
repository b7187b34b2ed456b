"""The settings of a cluster that other people operate, `provider: {type: existing}`, and their
checks.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from clusterctl.errors import UsageError
from clusterctl.spec.base import PATTERNS, DurationS, SlurmName
from clusterctl.spec.common import OF_OWN_MACHINES, ClusterBase, ProviderSettings, Refusal
from clusterctl.spec.names import Launcher
from clusterctl.spec.sbatch import words_of

_OPERATED: Final = "the site's administrators decide this, not the spec"
_REFUSED: Final[tuple[Refusal, ...]] = (
    ("scheduler", "it runs Slurm", "remove scheduler"),
    ("users", "jobs run as your account there", "remove users"),
    OF_OWN_MACHINES,
    *((f"partitions.{key}", _OPERATED, f"remove {key}") for key in ("cpus", "memory")),
    *(
        (f"software.{key}", "users can't install packages on this cluster's nodes", f"remove {key}")
        for key in ("slurm", "packages", "mirrors", "apptainer", "nvidia")
    ),
    *((f"slurm.{key}", _OPERATED, f"remove {key}") for key in ("accounts", "qos", "extra")),
    ("storage.name", "`clusterctl detach` never removes your own files", "remove name"),
    *((f"monitoring.{key}", _OPERATED, f"remove {key}") for key in ("health", "missed_checks")),
)


class ExistingSettings(ProviderSettings):
    """A Slurm cluster that other people operate: you have an account there. See
    docs/howto/attach.md.
    """

    refuses: ClassVar[tuple[Refusal, ...]] = _REFUSED
    foreign: ClassVar[bool] = True
    adopts_hosts: ClassVar[bool] = False
    may_have_fabric: ClassVar[bool] = False
    shares_kernel: ClassVar[bool] = False
    is_cloud: ClassVar[bool] = False
    late_account_fix: ClassVar[str] = ""
    first_verb: ClassVar[str] = "attach"
    default_uid: ClassVar[int | None] = None

    type: Literal["existing"] = Field(description="the provider's type")
    login: Annotated[str, PATTERNS["destination"]] = Field(
        description="the login node as ssh takes it: an alias of ~/.ssh/config, user@host, or "
        "ssh://user@host:port; a dot: this machine is the login node"
    )
    folder: Annotated[str, PATTERNS["remote_folder"]] = Field(
        "~/clusterctl",
        description="the folder there for everything that clusterctl writes; `attach` makes it absolute",
    )
    account: SlurmName | None = Field(
        None, description="Slurm account of jobs; default: yours in Slurm"
    )
    qos: SlurmName | None = Field(
        None, description="quality of service of jobs; default: your account's"
    )
    slurm: Annotated[tuple[str, ...], AfterValidator(words_of)] = Field(
        (), description="options of sbatch for jobs that do not set them, such as --constraint=cpu"
    )
    time: DurationS | None = Field(
        None, description="time limit of the job by which `attach` tests MPI; default: 5m"
    )
    routed: bool = Field(
        False,
        description="whether the site chooses the partition of each job itself, and refuses jobs that "
        "name one",
    )
    modules: tuple[Annotated[str, PATTERNS["module"]], ...] = Field(
        (), description="environment modules that jobs load, such as that of MPI"
    )
    launcher: Literal[Launcher.SRUN, Launcher.MPIRUN] | None = Field(
        None, description="the program that starts MPI ranks; by default `attach` finds it by a job"
    )
    python: Annotated[str, PATTERNS["absolute_path"]] | None = Field(
        None, description="Python 3.11 or newer on the nodes; by default `attach` searches for it"
    )
    slurm_path: Annotated[str, PATTERNS["absolute_path"]] | None = Field(
        None, description="the folder of Slurm's commands; by default `attach` asks a login shell"
    )

    def controller_of(self, cluster: str) -> str:  # noqa: ARG002
        return "login"

    @classmethod
    def reject_operation(cls, cluster: str) -> None:
        raise operators_only(cluster)

    @classmethod
    def of_login(cls, login: str) -> ExistingSettings:
        return cls.model_construct(type="existing", login=login)


def settings_of(spec: ClusterBase) -> ExistingSettings:
    """Return the settings of an attached cluster's spec. Raise TypeError for any other spec."""
    if not isinstance(spec.provider, ExistingSettings):
        raise TypeError("the spec is not of an attached cluster")
    return spec.provider


def operators_only(cluster: str) -> UsageError:
    """Return the error for a command that changes hosts, on a cluster that other people operate."""
    return UsageError(
        f"other people operate cluster {cluster!r}, so you can't change its nodes",
        code="unsupported",
        about="cluster-of-others",
        why="you use it with an ordinary account; only the site's administrators may do this",
        fix="ask them; `clusterctl attach` checks again what you may use, `clusterctl detach` "
        "removes what clusterctl has put there",
    )
