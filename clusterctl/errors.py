"""The errors that are expected: each says what happened, where, why, and what to do.

Foreign errors (paramiko, ansible-runner, pydantic, OSError...) are translated into this hierarchy at the
boundary where they enter, with ``from exc``. The command line shows all of them in one form and never a
traceback.

Exit codes: ``ClusterctlError`` 1; ``UsageError``, where the command or the spec is wrong, 2; the errors about
a job that `submit` waited for 4 to 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure as `-o json` shows it. ``host`` and ``phase`` are None where they do not apply."""

    code: str
    cause: str
    host: str | None = None
    phase: str | None = None
    fix: str = ""
    retryable: bool = False


class Notice(str):
    """A note or warning for the user, with the stable code that docs/errors.md lists it under."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: str, text: str) -> Self:
        notice = super().__new__(cls, text)
        notice.code = code
        return notice

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Return what a copy is made of: ``-o json`` copies the failures that it shows."""
        return type(self), (self.code, str(self))


class BadValueError(ValueError):
    """A text or a value of a spec, a job file or a flag means nothing, or is out of range."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ClusterctlError(Exception):
    """Base of all expected errors.

    ``code`` is stable and names the condition, such as ``subnet-in-use``: docs/errors.md lists all codes.
    A class that means one condition has it as an attribute; for any other class it is an argument.
    ``what`` happened, ``where`` (file, host, phase), ``why`` (the cause as the lower tool said it),
    ``fix`` (what to do now). ``failures`` carries one entry a host when several failed together.
    ``had_side_effects``: repeating the command would do something a second time, so it is not retryable.
    ``answer`` is what `-o json` shows besides the failures.
    """

    code: str = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    had_side_effects = False
    answer: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        what: str,
        *,
        code: str = "",
        where: str = "",
        why: str = "",
        fix: str = "",
        host: str | None = None,
        failures: tuple[Failure, ...] = (),
    ) -> None:
        super().__init__(what)
        self.code = code or self.code
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.host = host
        self._failures = failures

    @classmethod
    def of_hosts(
        cls, what: str, failures: Iterable[Failure], *, code: str = "", fix: str = "", then: str = ""
    ) -> Self:
        """One error of several hosts: their names replace ``{hosts}`` in ``what``, and each cause has a line.

        ``fix`` replaces the failures' own, ``then`` is said after them.
        """
        failures = tuple(failures)
        hosts = ", ".join(dict.fromkeys(str(failure.host) for failure in failures))
        fixes = dict.fromkeys([*([fix] if fix else [failure.fix for failure in failures]), then])
        return cls(
            what.replace("{hosts}", hosts),
            code=code,
            why="\n".join(f"{failure.host}: {failure.cause}" for failure in failures),
            fix="\n".join(filter(None, fixes)),
            failures=failures,
        )

    @property
    def cause(self) -> str:
        """What happened and why, in one text."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def on(self, host: str, phase: str) -> Failure:
        """This error as the failure of a host."""
        return Failure(self.code, self.why or self.what, host, phase, self.fix, self.retryable)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures behind this error, at least one."""
        own = Failure(self.code, self.cause, self.host, None, self.fix, self.retryable)
        found = self._failures or (own,)
        return tuple(replace(f, retryable=False) for f in found) if self.had_side_effects else found

    def also(self, failure: Failure) -> None:
        """Add a failure that came after those of this error."""
        self._failures = (*self.failures, failure)

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


def excluded(first: str, second: str) -> UsageError:
    """Return the error of a command line with both of two options that exclude each other."""
    return UsageError(
        f"{first} and {second} exclude each other", code="options-exclusive", fix="use one of them"
    )


def unaccompanied(option: str, needed: str) -> UsageError:
    """Return the error of a command line with an option but not the option that it needs."""
    return UsageError(f"{option} needs {needed}", code="option-needs-option", fix=f"say {needed}, too")


class NotUpError(UsageError):
    """The cluster that the command names is not up."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a spec file. ``line`` and ``column`` count from 1; ``key`` is a dotted path."""

    file: str
    line: int
    column: int
    key: str
    code: str
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
            Failure(p.code, f"{p.file}:{p.line}:{p.column}: {p.key}: {p.message}", fix=p.hint)
            for p in self.problems
        )

    def __str__(self) -> str:
        return "\n".join([printable(str(p)) for p in self.problems] + [super().__str__()])


class BundleError(UsageError):
    """A bundle is damaged, incomplete, or does not match; ``failures`` has one for each fault."""

    code = "bundle"


class MachineError(ClusterctlError):
    """This machine lacks a tool, a right, a kernel feature or a free subnet."""

    code = "machine"


class DiskError(MachineError):
    """A disk of this machine can't be written: it is full, read-only or failing, or a quota is exceeded."""

    code = "disk"


class ProvisionError(ClusterctlError):
    """A provider could not make or remove what was asked for."""

    code = "provision"


class CloudError(ProvisionError):
    """A cloud's API refused a request, or did not answer; ``status`` is the HTTP status or 0."""

    code = "cloud"
    status = 0


class CredentialsError(CloudError):
    """There are no credentials, or the cloud rejects them."""

    code = "credentials"


class PermissionDeniedError(CloudError):
    """The credentials are valid, but lack a permission."""

    code = "permission"


class ApiOffError(CloudError):
    """A project has not enabled an API."""

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
    """The plan that was shown is out of date: applying it now would do something else."""

    code = "stale-plan"
    retryable = True


class OnlyCopyError(ClusterctlError):
    """What would be removed holds data or jobs that exist nowhere else; ``failures`` has one for each."""

    code = "only-copy"


class LeftoversError(ClusterctlError):
    """`down` examined the machine itself, and found resources of the cluster."""

    code = "leftovers"


class TransportError(ClusterctlError):
    """Communication with a host failed."""

    code = "transport"


class UnreachableError(TransportError):
    """No connection to the host; trying again may help."""

    code = "unreachable"
    retryable = True


class NoAnswerError(UnreachableError):
    """A command on a host gave no output within its timeout, and was ended."""


class AnswerLostError(TransportError):
    """A command was sent to a host, and whether the host ran it is unknown."""

    code = "answer-lost"
    had_side_effects = True


class KeyRefusedError(TransportError):
    """The host lets nobody in with our key, or has no such account."""

    code = "key-refused"


class HostKeyError(TransportError):
    """The host's key is unknown or not the one we know. Never trusted on first use."""

    code = "host-key"


class CommandError(TransportError):
    """A command ran on a host and failed; ``rc`` is its exit status, ``stderr`` the end of what it said."""

    code = "command"

    def __init__(
        self,
        what: str,
        *,
        rc: int,
        stderr: str = "",
        code: str = "",
        where: str = "",
        fix: str = "",
        host: str | None = None,
    ) -> None:
        why = stderr.strip()[-2000:]
        super().__init__(what, code=code, where=where, why=why, fix=fix, host=host)
        self.rc = rc
        self.stderr = stderr


class ConfigureError(ClusterctlError):
    """Playbook tasks failed; ``failures`` has one entry a host, with role and task in ``phase``."""

    code = "configure"


class SchedulerError(ClusterctlError):
    """The scheduler refused a request, or does not know its object."""

    code = "scheduler"


class SlurmError(SchedulerError):
    """Slurm refused a request, or its answer could not be understood."""

    code = "slurm"


class VerifyError(ClusterctlError):
    """The cluster was configured, but its verification job failed on some node."""

    code = "verify"


class LockedError(ClusterctlError):
    """Another clusterctl holds the lock of this cluster."""

    code = "locked"
    retryable = True


class CollectError(ClusterctlError):
    """A run could not be collected completely; what arrived is kept, and the next collect resumes there.

    ``jobs`` are the ids of the jobs whose runs these are, where they are known.
    """

    code = "collect"
    retryable = True
    jobs: tuple[str, ...] = ()


class TransferError(ClusterctlError):
    """Files could not be transferred completely; what arrived is kept, and the same command resumes there."""

    code = "transfer"
    retryable = True


class JobFailedError(ClusterctlError):
    """The job that `submit` waited for failed."""

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
