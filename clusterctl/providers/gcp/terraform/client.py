"""Terraform on one folder: init, plan, apply the very plan that was shown, outputs, destroy."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clusterctl.errors import ProvisionError, StalePlanError
from clusterctl.providers.gcp.terraform.plan import Plan, outputs_change, read_changes
from clusterctl.providers.gcp.terraform.program import FLAG, Program, command_line, find, shared_providers
from clusterctl.providers.gcp.terraform.run import (
    Diagnostic,
    Progress,
    Resource,
    blocking_lock,
    errors_in,
    forget_runs,
    is_stale,
    parse_event,
    printed_errors,
    run,
)
from clusterctl.state.workspace import write_atomic
from clusterctl.util.progress import LineReporter

Explain = Callable[[str, tuple[Diagnostic, ...]], ProvisionError]

PLAN_FILE: Final = "plan.tfplan"
BACKEND_FILE: Final = "backend.tfbackend"
_IMPORTS: Final = "clusterctl-adopt.tf.json"
_CHANGES: Final = 2  # exit code of a plan that has some
_PARALLEL: Final = 30  # what is made at once; most of the time is waiting
_LOCK_TIMEOUT: Final = "20s"
_STALE: Final = ("Saved plan is stale", "Saved plan does not match the given state")


def as_said(what: str, found: tuple[Diagnostic, ...]) -> ProvisionError:
    """The failure as Terraform says it."""
    return ProvisionError(what, why="\n".join(d.text for d in found))


@dataclass(slots=True)
class Terraform:
    """Terraform's working folder: a module, ``*.auto.tfvars.json``, and the state unless a backend has it.

    ``explain`` makes an error of what was being done and Terraform's diagnostics; ``names`` says what a
    person calls a resource. Every method raises what ``explain`` makes, MachineError where there is no
    Terraform, and LockedError while another one is at work in the folder.
    """

    folder: Path
    report: LineReporter
    explain: Explain = as_said
    names: Callable[[Resource], str] = str
    program: Program | None = None  # found when it is needed

    def init(self) -> None:
        """Fetch the providers and set up the backend; versions stay as the lock file has them.

        A state that an earlier run could not write is written first.
        """
        restore_torn_state(self.folder, self.report)
        backend = BACKEND_FILE if (self.folder / BACKEND_FILE).is_file() else None
        with shared_providers(self.folder, self.report) as env:
            what = "Terraform could not be set up"
            self._printing(what, "init", env=env, input=False, reconfigure=FLAG, backend_config=backend)
        if (left := self.folder / ERRORED_FILE).is_file():
            self.report("writing the state that an earlier run could not write")
            self._printing(f"the state in {left} could not be written", "state push", ERRORED_FILE)
            left.unlink()

    def plan(self, *, destroy: bool = False, adopt: Mapping[str, str] = MappingProxyType({})) -> Plan:
        """Look at the world and save what there is to do; with ``destroy``, to remove all.

        ``adopt``, address -> id, is there already, and is taken into the state by this plan.
        """
        restore_torn_state(self.folder, self.report)
        with _import_blocks(self.folder, adopt):
            code, found = self._events(
                "plan",
                out=PLAN_FILE,
                input=False,
                destroy=FLAG if destroy else None,
                detailed_exitcode=FLAG,
                lock_timeout=_LOCK_TIMEOUT,
            )
        path = self.folder / PLAN_FILE
        digest = _digest(path) if code in (0, _CHANGES) else ""
        shown = parse_event(self._captured("show", PLAN_FILE, json=FLAG)[1]) if digest else None
        if shown is None:
            raise self.explain("Terraform could not make a plan", found)
        return Plan(path, digest, read_changes(shown), destroy, outputs_change(shown))

    def apply(self, plan: Plan) -> None:
        """Apply this very plan; if it is stale, what is left of it, and nothing that it does not show.

        Raises:
            StalePlanError: something else would have to be done by now.
        """
        if _is_saved(plan) and self._applied(plan):
            return
        left = self.rest_of(plan)
        if not left.is_empty and not self._applied(left):
            raise StalePlanError(
                "the state changes while it is worked on",
                where=str(self.folder),
                fix="let others end what they do to this cluster, then run the same command again",
            )

    def rest_of(self, plan: Plan, *, adopt: Mapping[str, str] = MappingProxyType({})) -> Plan:
        """What is left to do of ``plan``, planned anew; see ``plan`` for ``adopt``.

        Raises:
            StalePlanError: it would do something that ``plan`` does not show.
        """
        left = self.plan(destroy=plan.destroys, adopt=adopt)
        if beyond := plan.beyond(left):
            raise StalePlanError(
                "what there is to do has changed since it was shown",
                why="; ".join(f"{change.action} {change.address}" for change in beyond),
                fix="see it with `clusterctl plan`, then run the same command again",
            )
        return left

    def outputs(self) -> Mapping[str, Any]:
        """The values of the outputs by name, without sensitive ones."""
        code, text, said = self._captured("output", json=FLAG)
        answer = parse_event(text)
        if code != 0 or answer is None:
            raise self.explain("Terraform's outputs can't be read", said)
        return {name: output["value"] for name, output in answer.items() if not output["sensitive"]}

    def _applied(self, plan: Plan) -> bool:
        """Apply a plan file; False if it is stale, and nothing was done."""
        code, found = self._events(
            "apply", plan.path.name, parallelism=_PARALLEL, input=False, lock_timeout=_LOCK_TIMEOUT
        )
        if code != 0 and any(d.summary in _STALE for d in found):
            return False
        if code != 0:
            raise self.explain(
                "not all could be removed" if plan.destroys else "not all could be made", found
            )
        return True

    def _events(self, verb: str, *words: str, **options: object) -> tuple[int, tuple[Diagnostic, ...]]:
        """Run it with -json and tell its progress; its exit code, and its errors if it failed."""
        progress = Progress(self.report, self.names)
        found: list[Diagnostic] = []
        other: list[str] = []

        def hear(line: str) -> None:
            if (event := parse_event(line)) is None:
                other.append(line)
            elif event.get("type") == "diagnostic":
                found.append(Diagnostic.of(event["diagnostic"]))
            else:
                progress.take(event)

        began = time.time()
        ended = run(
            self._argv(verb, *words, json=FLAG, **options), self.folder, heard=hear, report=self.report
        )
        if ended.code in (0, _CHANGES):
            return ended.code, ()
        failed = errors_in(found) or printed_errors("".join(other) + ended.stderr, code=ended.code)
        if self._unlocked(failed, began):
            return self._events(verb, *words, **options)
        return ended.code, failed

    def _unlocked(self, failed: tuple[Diagnostic, ...], began: float) -> bool:
        """Whether it failed for a lock that a Terraform of ours left behind, and that is released now."""
        held = blocking_lock(failed)
        if held is None or not is_stale(held, self.folder, before=began):
            return False
        self.report(
            f"releasing the state lock that a Terraform left behind which was killed ({held.created})"
        )
        self._printing("the state could not be unlocked", "force-unlock", held.id, force=FLAG)
        forget_runs(self.folder)
        return True

    def _printing(
        self, what: str, verb: str, *words: str, env: Mapping[str, str] | None = None, **options: object
    ) -> None:
        """Run what has no -json; its failure is explained after ``what``."""
        said: list[str] = []
        command_line = self._argv(verb, *words, **options)
        ended = run(command_line, self.folder, env=env or {}, heard=said.append, report=self.report)
        if ended.code != 0:
            raise self.explain(what, printed_errors("".join(said) + ended.stderr, code=ended.code))

    def _captured(self, verb: str, *words: str, **options: object) -> tuple[int, str, tuple[Diagnostic, ...]]:
        """Run what only answers: its exit code, its answer, and the errors that it printed if it failed."""
        answer: list[str] = []
        ended = run(self._argv(verb, *words, **options), self.folder, heard=answer.append, report=self.report)
        said = () if ended.code == 0 else printed_errors(ended.stderr, code=ended.code)
        return ended.code, "".join(answer), said

    def _argv(self, verb: str, *words: str, **options: object) -> list[str]:
        if self.program is None:
            self.program = find(report=self.report)
        return command_line(self.program, verb, *words, **options)


@contextmanager
def _import_blocks(folder: Path, adopt: Mapping[str, str]) -> Iterator[None]:
    """Have them in the module while a plan is made; the plan file has them then."""
    path = folder / _IMPORTS
    if adopt:
        blocks = [{"to": address, "id": identity} for address, identity in adopt.items()]
        write_atomic(path, json.dumps({"import": blocks}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_saved(plan: Plan) -> bool:
    return plan.path.is_file() and _digest(plan.path) == plan.digest


STATE_FILE: Final = "terraform.tfstate"
ERRORED_FILE: Final = "errored.tfstate"  # written by Terraform where it could not write the state


def restore_torn_state(folder: Path, report: LineReporter) -> None:
    """Put the state of the run before in place of a local state that is torn.

    Terraform writes the file in place: killed in that moment, it leaves an empty file, which it then takes
    for no state at all; on a full disk a part, which it refuses. Where there is no state before, none is put
    in its place. What was made since is found by its name when it is to be made again.
    """
    path, backup, errored = folder / STATE_FILE, folder / f"{STATE_FILE}.backup", folder / ERRORED_FILE
    if errored.is_file() and not _is_whole(errored):
        errored.unlink()
    has_backup = _is_whole(backup)
    if not path.is_file() or _is_whole(path) or not (has_backup or path.stat().st_size):
        return
    report("the state was torn when Terraform wrote it: going on from the one before")
    path.rename(folder / f"{STATE_FILE}.torn-{time.strftime('%Y%m%dT%H%M%S')}")
    if has_backup:
        write_atomic(path, backup.read_bytes())


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False
