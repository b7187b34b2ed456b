"""What can go wrong, said once: what happened, where, why, and what to do.

Foreign errors (paramiko, ansible-runner, pydantic, OSError...) are translated into this tree at the one
boundary where they enter, with ``from exc``. The command line shows any of these in one shape and never a
traceback.

    ClusterctlError                exit 1
      UsageError                   exit 2   the command is wrong
        NotUpError                 exit 2   there is no such cluster, or it is not up to the end
        SpecError                  exit 2   the spec is wrong: every problem of the file at once
        BundleError                exit 2   a bundle is damaged, or not the one for this spec and clusterctl
      MachineError                          this machine cannot do it: tool, right, kernel feature, subnet
        DiskError                           a disk here takes nothing more: full, quota, read-only, failing
      ProvisionError                        a provider could not make or remove what was asked for
        CloudError                          a cloud's API refused, or did not answer
          CredentialsError                  who calls is not known to it
          PermissionDeniedError             who calls may not do that
          ApiOffError                       the project has not enabled that API
        TerraformError                      Terraform failed at part of it; one failure a cause and host
        StalePlanError                      what would be done by now is not what was shown
      LeftoversError                        `down` looked, and something is still there
      TransportError                        a host could not be reached or a command on it could not run
        UnreachableError                    (retryable)
          NoAnswerError                     a command said nothing for too long; the host may be fine
        AnswerLostError                     what was asked for may have been done all the same
        HostKeyError                        the host is not who it should be
        CommandError                        the command ran and failed
      ConfigureError                        a playbook task failed; one failure a host
      SchedulerError                        who runs the jobs refused, or does not know a job
        SlurmError                          Slurm refused, or answered what we do not understand
      VerifyError                           the cluster is up but did not prove itself
      LockedError                           another clusterctl works on this cluster
      TransferError                         files could not be sent or fetched whole
      CollectError                          a run could not be brought home whole
      JobFailedError               exit 4
      JobCancelledError            exit 5   cancelled or timed out
      WaitTimeoutError             exit 6   the wait ran out, the job goes on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure as `-o json` shows it. ``host`` and ``phase`` are None where they do not apply."""

    code: str
    cause: str
    host: str | None = None
    phase: str | None = None
    fix: str = ""
    retryable: bool = False


class ClusterctlError(Exception):
    """Base of all expected errors.

    ``what`` happened, ``where`` (file, host, phase), ``why`` (the cause as the lower tool said it),
    ``fix`` (what to do now). ``failures`` carries one entry a host when several failed together.
    ``had_side_effects``: repeating the command would do something a second time, so it is not retryable.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        why: str = "",
        fix: str = "",
        host: str | None = None,
        phase: str | None = None,
        failures: tuple[Failure, ...] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.host = host
        self.phase = phase
        self.had_side_effects = False
        self._failures = failures

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures behind this error, at least one."""
        cause = f"{self.what}: {self.why}" if self.why else self.what
        own = Failure(self.code, cause, self.host, self.phase, self.fix, self.retryable)
        found = self._failures or (own,)
        return tuple(replace(f, retryable=False) for f in found) if self.had_side_effects else found

    def __str__(self) -> str:
        """Lines for a person. Only why and fix may have several, which no text can begin at the margin."""
        head = f"{self.what} ({self.where})" if self.where else self.what
        lines = [printable(head)]
        for title, text in (("why", self.why), ("fix", self.fix)):
            for number, line in enumerate(text.split("\n") if text else ()):
                before = "       " if number else f"  {title}: "
                lines.append(before + printable(line.removesuffix("\r").expandtabs()))
        return "\n".join(lines)


class UsageError(ClusterctlError):
    """The command or its arguments are wrong."""

    code = "usage"
    exit_code = 2


class NotUpError(UsageError):
    """The cluster that is meant is not up."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a spec file. ``line`` and ``column`` count from 1; ``key`` is a dotted path."""

    file: str
    line: int
    column: int
    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}:{self.column}: {self.key}: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text


class SpecError(UsageError):
    """A spec or a job file is wrong; ``problems`` holds every problem of the file, in file order."""

    code = "spec"

    def __init__(self, file: str, problems: tuple[Problem, ...], *, kind: str = "spec") -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(f"{file} is not a valid {kind}: {count}", fix="correct the lines named above")
        self.problems = problems

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(
            Failure(self.code, f"{p.file}:{p.line}:{p.column}: {p.key}: {p.message}", fix=p.hint)
            for p in self.problems
        )

    def __str__(self) -> str:
        return "\n".join([printable(str(p)) for p in self.problems] + [super().__str__()])


class BundleError(UsageError):
    """A bundle is damaged, incomplete, or not for this; ``failures`` has one for each thing that is wrong."""

    code = "bundle"


class MachineError(ClusterctlError):
    """This machine lacks a tool, a right, a kernel feature or a free subnet."""

    code = "machine"


class DiskError(MachineError):
    """A disk of this machine takes nothing more: it is full or read-only, it fails, or a quota is used up."""

    code = "disk"


class ProvisionError(ClusterctlError):
    """A provider could not make or remove what was asked for."""

    code = "provision"


class CloudError(ProvisionError):
    """A cloud's API refused a request, or did not answer; ``status`` is HTTP's, 0 where there was none."""

    code = "cloud"

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "", status: int = 0) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.status = status


class CredentialsError(CloudError):
    """There are no credentials, or the cloud does not take them."""

    code = "credentials"


class PermissionDeniedError(CloudError):
    """The credentials are fine, and lack a right."""

    code = "permission"


class ApiOffError(CloudError):
    """The project has not enabled the API that was called."""

    code = "api-off"


class TerraformError(ProvisionError):
    """Terraform, or the cloud behind it, failed in part; ``failures`` has one for each cause and host.

    ``transient``: every cause passes by itself, so that a retry after a while helps. ``already_exists``,
    Terraform address -> id: resources that could not be created because they exist already.
    """

    code = "terraform"
    transient = False
    already_exists: Mapping[str, str] = MappingProxyType({})


class StalePlanError(ProvisionError):
    """What would be done by now is not what was shown."""

    code = "stale-plan"
    retryable = True


class LeftoversError(ClusterctlError):
    """`down` looked at the machine itself, and something of the cluster is still there."""

    code = "leftovers"


class TransportError(ClusterctlError):
    """A host could not be talked to."""

    code = "transport"


class UnreachableError(TransportError):
    """No connection to the host; trying again may help."""

    code = "unreachable"
    retryable = True


class NoAnswerError(UnreachableError):
    """A command on a host did not answer, or came no further, within its time; it was ended."""


class AnswerLostError(TransportError):
    """A host was asked to do something, and whether it did is not known."""

    code = "answer-lost"

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "", host: str) -> None:
        super().__init__(what, where=where, why=why, fix=fix, host=host)
        self.had_side_effects = True


class HostKeyError(TransportError):
    """The host's key is unknown or not the one we know. Never trusted on first use."""

    code = "host-key"


class CommandError(TransportError):
    """A command ran on a host and failed; ``rc`` is its exit status, ``stderr`` the end of what it said."""

    code = "command"

    def __init__(
        self, what: str, *, rc: int, stderr: str = "", where: str = "", fix: str = "", host: str | None = None
    ) -> None:
        super().__init__(what, where=where, why=stderr.strip()[-2000:], fix=fix, host=host)
        self.rc = rc
        self.stderr = stderr


class ConfigureError(ClusterctlError):
    """Playbook tasks failed; ``failures`` has one entry a host, with role and task in ``phase``."""

    code = "configure"


class SchedulerError(ClusterctlError):
    """Who runs the jobs refused a request, or does not know what was asked for."""

    code = "scheduler"


class SlurmError(SchedulerError):
    """Slurm refused a request, or its answer could not be understood."""

    code = "slurm"


class VerifyError(ClusterctlError):
    """The cluster was configured but its proof job did not run right on every node."""

    code = "verify"


class LockedError(ClusterctlError):
    """Another clusterctl works on this cluster."""

    code = "locked"
    retryable = True


class CollectError(ClusterctlError):
    """A run could not be brought home whole; what arrived is kept and the next collect goes on from there.

    ``jobs`` are the ids of the jobs whose runs these are, where they are known.
    """

    code = "collect"
    retryable = True
    jobs: tuple[str, ...] = ()


class TransferError(ClusterctlError):
    """Files could not be sent or fetched whole; what arrived is kept, the same command goes on from it."""

    code = "transfer"
    retryable = True


class JobFailedError(ClusterctlError):
    """The job ended, and not well."""

    code = "job-failed"
    exit_code = 4


class JobCancelledError(ClusterctlError):
    """The job was cancelled or ran into its time limit."""

    code = "job-cancelled"
    exit_code = 5


class WaitTimeoutError(ClusterctlError):
    """The wait ran out; the job goes on. Not retryable: the same `submit` again would be a second job."""

    code = "wait-timeout"
    exit_code = 6


def printable(text: str) -> str:
    """The text as one line without anything that a terminal would act upon."""
    return text if text.isprintable() else "".join(c if c.isprintable() else visible(c) for c in text)


def visible(char: str) -> str:
    """A character as Python writes it; U+DC80 to U+DCFF stand for bytes that are not UTF-8."""
    if "\udc80" <= char <= "\udcff":
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")
