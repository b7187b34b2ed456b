"""All expected errors: each has a message, and may have a place, a cause and a fix (advice to the
user).

Code that calls a library (paramiko, pydantic) or the operating system translates
their errors to these classes, with ``from exc``. The command line shows all of them in the same
format, without a traceback.

Exit codes: ``ClusterctlError`` 1; ``UsageError`` (a wrong command or spec) 2; errors of a job that
`submit` waited for 4 to 6; a rehearsed job that did not survive 7.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as `-o json` shows it.

    code: its kind, one of the table in docs/json.md.
    about: the thing of this kind that failed, such as ``cluster`` of ``not-found``. Default: "".
    host, phase: where it happened. None: unknown.
    """

    code: str
    cause: str
    host: str | None = None
    phase: str | None = None
    fix: str = ""
    retryable: bool = False
    about: str = ""


class Notice(str):
    """A note or a warning for the user. ``code``: its name, which never changes."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: str, text: str) -> Self:
        notice = super().__new__(cls, text)
        notice.code = code
        return notice

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.code, str(self))


class Quoted(str):
    """A text of another process. The screen shows the commands in it as they are."""

    __slots__ = ()


class BadValueError(ValueError):
    """A value in a spec, a job file or a flag is malformed or out of range."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ClusterctlError(Exception):
    """The base of all expected errors.

    code: its kind, such as ``in-use``: what a program does about it. Default: the attribute of the
        class.
    about: the thing of this kind, such as ``subnet``. Default: the attribute of the class.
    what: the message: what failed.
    where: file, host or phase.
    why: the cause, in the words of the failed tool.
    fix: the command or the change that helps.
    failures: a failure for each host, if several hosts failed.

    ``had_side_effects``: the failed command may have had an effect, so that a retry is not safe.
    ``answer``: the fields that `-o json` shows in addition to the failures.
    """

    code: str = "internal"
    about: str = ""
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    had_side_effects = False
    answer: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        about: str | None = None,
        exit_code: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        """Set the attributes that are given for a subclass, and inherit the rest."""
        super().__init_subclass__()
        for name, value in (
            ("code", code),
            ("about", about),
            ("exit_code", exit_code),
            ("retryable", retryable),
        ):
            if value is not None:
                setattr(cls, name, value)

    def __init__(
        self,
        what: str,
        *,
        code: str = "",
        about: str = "",
        where: str = "",
        why: str = "",
        fix: str = "",
        host: str | None = None,
        failures: tuple[Failure, ...] = (),
    ) -> None:
        super().__init__(what)
        self.about = about if code or about else self.about
        self.code = code or self.code
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.host = host
        self._failures = failures

    @classmethod
    def of_hosts(
        cls,
        what: str,
        failures: Iterable[Failure],
        *,
        code: str = "",
        about: str = "",
        fix: str = "",
        then: str = "",
    ) -> Self:
        """Return an error that joins the failures of several hosts, with a line for each cause.

        what: the message, in which ``{hosts}`` is replaced by the names of the hosts.
        fix: used instead of the fixes of the failures. Empty: the fixes of the failures.
        then: another fix, which is shown last.
        """
        failures = tuple(failures)
        hosts = ", ".join(dict.fromkeys(str(failure.host) for failure in failures))
        fixes = dict.fromkeys([*([fix] if fix else [failure.fix for failure in failures]), then])
        return cls(
            what.replace("{hosts}", hosts),
            code=code,
            about=about,
            why="\n".join(f"{failure.host}: {failure.cause}" for failure in failures),
            fix="\n".join(filter(None, fixes)),
            failures=failures,
        )

    @property
    def cause(self) -> str:
        """The message and the cause as a single text."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def on(self, host: str, phase: str) -> Failure:
        """Return this error as a failure that happened on ``host`` in ``phase``."""
        return replace(self._single(), cause=self.why or self.what, host=host, phase=phase)

    def _single(self) -> Failure:
        return Failure(self.code, self.cause, self.host, None, self.fix, self.retryable, self.about)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures given at creation. If no failures were given, this error as a single
        failure.
        """
        failures = self._failures or (self._single(),)
        return (
            tuple(replace(f, retryable=False) for f in failures)
            if self.had_side_effects
            else failures
        )

    def also(self, failure: Failure) -> None:
        self._failures = (*self.failures, failure)

    def __str__(self) -> str:
        """Format the error for people. Only the cause and the fix may have several lines, all
        indented.
        """
        head = f"{self.what} ({self.where})" if self.where else self.what
        lines = [printable(head)]
        for title, text in (("why", self.why), ("fix", self.fix)):
            for number, line in enumerate(text.split("\n") if text else ()):
                prefix = "       " if number else f"  {title}: "
                lines.append(prefix + printable(line.removesuffix("\r").expandtabs()))
        return "\n".join(lines)


@contextmanager
def marking_side_effects(some: bool = True) -> Iterator[None]:
    """If ``some``, set ``had_side_effects`` of errors in the block: jobs are already submitted."""
    try:
        yield
    except ClusterctlError as exc:
        exc.had_side_effects = exc.had_side_effects or some
        raise


class UsageError(ClusterctlError, code="option-invalid", exit_code=2):
    """The command or its arguments are wrong."""


def excluded(first: str, second: str) -> UsageError:
    message = f"{first} can't be combined with {second}"
    fix = f"leave out {first} or {second}"
    return UsageError(message, code="options-exclusive", fix=fix)


def unaccompanied(option: str, needed: str) -> UsageError:
    return UsageError(
        f"{option} needs {needed}",
        about="option-missing",
        fix=f"also pass {needed}",
    )


def raise_together(errors: Iterable[UsageError]) -> None:
    """Raise a single error for all errors about a command. Nothing is raised if there are none."""
    found = [*{str(error): error for error in errors}.values()]
    if len(found) == 1:
        raise found[0]
    if found:
        causes = [f"{one.where}: {one.cause}" if one.where else one.cause for one in found]
        raise UsageError(
            f"{len(found)} values do not fit",
            about="several",
            why="\n".join(causes),
            fix="\n".join(dict.fromkeys(one.fix for one in found if one.fix)),
            failures=tuple(
                replace(one._single(), cause=cause)
                for one, cause in zip(found, causes, strict=True)
            ),
        )


def foreign_package_error(exc: BaseException) -> UsageError | None:
    """Return the error to show if a package of PYTHONPATH caused an exception, or None."""
    folders = [
        # Links stay as they are.
        os.path.abspath(name)
        for name in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if name
    ]
    files = [
        getattr(exc, "path", None),
        *(frame.filename for frame in traceback.extract_tb(exc.__traceback__)),
    ]
    own = Path(__file__).parents[1]
    for file in filter(None, reversed(files)):
        # A folder above clusterctl's own also contains clusterctl.
        foreign = (name for name in folders if not own.is_relative_to(name))
        folder = next((name for name in foreign if Path(file).is_relative_to(name)), None)
        if folder is not None:
            package = Path(file).relative_to(folder).parts[0].removesuffix(".py")
            return UsageError(
                f"clusterctl can't use the package {package} that PYTHONPATH selects",
                code="tool-failed",
                about="foreign-package",
                where=file,
                why=f"{type(exc).__name__}: {exc}",
                fix="unset PYTHONPATH: `env -u PYTHONPATH clusterctl …`",
            )
    return None


class NotUpError(UsageError, code="not-up"):
    """The cluster that the command names is not up."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a spec or job file. ``line`` and ``column`` count from 1; ``key``: path such as
    `a.b`.
    """

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


class SpecError(UsageError, code="spec-invalid"):
    """A spec or a job file is wrong; ``problems`` holds every problem of the file, in file
    order.
    """

    def __init__(self, file: str, problems: tuple[Problem, ...], *, kind: str = "spec") -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(
            f"{file} is not a valid {kind}: {count}", fix="correct the lines named above"
        )
        self.problems = problems

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(
            Failure(
                self.code,
                f"{p.file}:{p.line}:{p.column}: {p.key}: {p.message}",
                fix=p.hint,
                about=p.code,
            )
            for p in self.problems
        )

    def __str__(self) -> str:
        return "\n".join([printable(str(p)) for p in self.problems] + [super().__str__()])


class MachineError(ClusterctlError, code="tool-failed"):
    """This machine lacks a tool, a right, a kernel feature or a free subnet."""


class DiskError(MachineError, code="disk-full", about="state"):
    """A disk of this machine can't be written: it is full, read-only or failing, or a quota is
    exceeded.
    """


class ProvisionError(ClusterctlError, code="tool-failed"):
    """A provider could not create or remove something."""


class CloudError(ProvisionError, code="cloud-refused"):
    """A cloud's API rejected a request, or did not answer; ``status`` is the HTTP status or 0."""

    status = 0


class CredentialsError(CloudError, code="cloud-login"):
    """There are no credentials, or the cloud rejects them."""


class PermissionDeniedError(CloudError, code="cloud-permission"):
    """The credentials are valid but lack a permission."""


class ApiOffError(CloudError, code="api-off"):
    """The cloud project has not enabled an API that clusterctl needs."""


class TerraformError(ProvisionError, about="terraform"):
    """Terraform or the cloud failed in part; ``failures`` has an entry for each cause and host.

    ``transient``: all causes are temporary, so a later retry helps.
    """

    transient = False


class StalePlanError(ProvisionError, code="plan-changed", retryable=True):
    """The changes that the user confirmed are out of date, because something changed in the
    meantime.
    """


class OnlyCopyError(ClusterctlError, code="would-lose", about="files"):
    """A removal would destroy data or jobs that exist nowhere else; ``failures`` lists them."""


class LeftoversError(ClusterctlError, code="leftovers"):
    """Resources of a cluster still exist after `down` has removed the cluster."""


class TransportError(ClusterctlError, code="unreachable"):
    """Communication with a host failed.

    jump_host: the jump host that can't be reached. "": the error is the host's own.
    """

    jump_host = ""


class UnreachableError(TransportError, retryable=True):
    """A host could not be reached; a retry may help."""


class TunnelError(UnreachableError):
    """The program that carries the SSH connection to a host did not reach the host.

    ``has_grace``: a new host should be reached within a minute, so longer retries do not help.
    """

    has_grace = False


class TunnelRefusedError(TransportError, code="cloud-permission", about="tunnel"):
    """The service that carries the SSH connection rejects the login.

    ``has_grace``: the login may be valid for a new host within a minute. Otherwise, retries do not
        help.
    """

    has_grace = False


class NoAnswerError(UnreachableError):
    """A command on a host printed nothing within its timeout and was killed."""


class AnswerLostError(TransportError, code="answer-lost"):
    """A command was sent to a host, but it is unknown whether the host ran it."""

    had_side_effects = True


class KeyRefusedError(TransportError, code="login-refused", about="key"):
    """A host rejects clusterctl's key, or lacks the account."""


class HostKeyError(TransportError, code="host-key"):
    """A host's key differs from the recorded key, or is unknown. Unknown keys are never trusted."""


class CommandError(TransportError, code="tool-failed", about="command"):
    """A command on a host failed; ``rc`` is its exit status, ``why`` the last part of its
    stderr.
    """

    def __init__(
        self,
        what: str,
        *,
        rc: int,
        stderr: str = "",
        code: str = "",
        about: str = "",
        where: str = "",
        fix: str = "",
        host: str | None = None,
    ) -> None:
        why = stderr.strip()[-2000:]
        super().__init__(what, code=code, about=about, where=where, why=why, fix=fix, host=host)
        self.rc = rc
        self.stderr = stderr


class ConfigureError(ClusterctlError, code="configure-failed"):
    """Tasks of Ansible failed; ``failures`` has an entry for each host, with role and task in
    ``phase``.
    """


class SchedulerError(ClusterctlError, code="slurm-refused"):
    """The scheduler rejected a request, or does not know the job, node or reservation."""


class SlurmError(SchedulerError):
    """Slurm rejected a request, or its output could not be parsed.

    nodes_out: a pattern of sbatch's messages with --test-only about a job whose nodes are all drained
        or down. Without --test-only, the job waits.
    broken: a pattern of the messages of Slurm's programs without a readable slurm.conf, or without
        munge.
    """

    broken: ClassVar = re.compile("Unable to process configuration file|Munge encode failed")
    nodes_out: ClassVar = re.compile(
        "node configuration is not available|nodes? (required|not available)", re.IGNORECASE
    )


class JobRefusedError(SlurmError, about="job"):
    """Slurm does not accept a job."""


class SlurmAwayError(SlurmError, code="slurm-away", retryable=True):
    """slurmctld did not answer. The same command may succeed later.

    words: a pattern of the messages of Slurm's commands then, and of the accounting's if slurmdbd
        is away.
    """

    words: ClassVar = re.compile(
        r"Unable to contact slurm controller|Connection refused|Zero Bytes were transmitted|Socket timed out"
        r"|Slurm backup controller in standby mode|Connection timed out|Problem talking to (the )?database"
        r"|Unable to contact (the )?slurmdbd|Sending PersistInit msg|slurm_persist_conn_open",
        re.IGNORECASE,
    )


class VerifyError(ClusterctlError, code="not-ready", about="verify"):
    """The cluster was configured, but its verification job failed on a node."""


class LockedError(ClusterctlError, code="in-use", about="cluster", retryable=True):
    """Another clusterctl process holds the lock of this cluster."""


class CollectError(ClusterctlError, code="transfer-failed", retryable=True):
    """A run could not be collected completely. Collected files are kept, and the next collect
    resumes.

    ``jobs``: the IDs of the runs' jobs, as far as known.
    """

    jobs: tuple[str, ...] = ()


class TransferError(ClusterctlError, code="transfer-failed", retryable=True):
    """Files could not be transferred completely. Transferred files are kept, and the same command
    resumes.
    """


class JobFailedError(ClusterctlError, code="job-failed", exit_code=4):
    """The job that `submit` or `wait` waited for failed."""


class JobCancelledError(ClusterctlError, code="job-cancelled", exit_code=5):
    """The job was cancelled or reached its time limit."""


class JobStuckError(JobFailedError, code="job-stuck"):
    """The job that `submit` waited for never starts, unless a person changes the job or the
    cluster.
    """


class WaitTimeoutError(ClusterctlError, code="wait-timeout", exit_code=6):
    """`submit` or `wait` stopped waiting; the job is not cancelled. Not retryable: `submit` again
    starts a second job.

    ``jobs``: the jobs as they were last seen.
    """

    jobs: tuple[Any, ...] = ()


class RehearsalError(ClusterctlError, code="job-failed", about="rehearsal", exit_code=7):
    """The job did not survive all faults of a rehearsal."""


def printable(text: str) -> str:
    """Return the text as a single line without control characters."""
    return (
        text if text.isprintable() else "".join(c if c.isprintable() else visible(c) for c in text)
    )


def visible(char: str) -> str:
    r"""Return a character as an escape, such as ``\n``. U+DC80 to U+DCFF stand for bytes outside UTF-8."""
    if "\udc80" <= char <= "\udcff":
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")
