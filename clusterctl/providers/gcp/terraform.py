"""Terraform on one folder: init, plan, apply the very plan that was shown, outputs, destroy.

Providers are downloaded once: Google's is some 100 MB. Users with a Terraform configuration of their own have
their own mirrors and caches, which we leave alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from clusterctl.errors import ProvisionError, StalePlanError
from clusterctl.providers.gcp import terraform_run
from clusterctl.providers.gcp.terraform_program import FLAG, Program, command_line, find
from clusterctl.providers.gcp.terraform_run import Diagnostic, Event, Runner
from clusterctl.state.workspace import cache_home, hold, write_atomic
from clusterctl.util.assets import file_sha256
from clusterctl.util.progress import Waiting

Explain = Callable[[str, tuple[Diagnostic, ...]], ProvisionError]

PLAN_FILE: Final = "plan.tfplan"
STATE_FILE: Final = "terraform.tfstate"
ERRORED_FILE: Final = "errored.tfstate"  # written by Terraform where it could not write the state
BACKEND_FILE: Final = "backend.tfbackend"
_IMPORTS: Final = "clusterctl-adopt.tf.json"
_PLUGIN_CACHE: Final = "TF_PLUGIN_CACHE_DIR"
_CONFIGURATIONS: Final = ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG")
_CHANGES: Final = 2  # exit code of a plan that has some
_PARALLEL: Final = 30  # what is made at once; most of the time is waiting
_LOCK_TIMEOUT: Final = "20s"
_STALE: Final = ("Saved plan is stale", "Saved plan does not match the given state")


@dataclass(slots=True)
class Terraform(Runner):
    """Terraform's working folder: a module, ``*.auto.tfvars.json``, and the state unless a backend has it.

    ``explain`` makes an error of what was being done and Terraform's diagnostics; ``names`` says what a
    person calls a resource. Every method raises what ``explain`` makes, MachineError where there is no
    Terraform, and LockedError while another one is at work in the folder.
    """

    explain: Explain
    names: Callable[[terraform_run.Resource], str]
    program: Program | None = None  # found when it is needed

    def init(self) -> None:
        """Fetch the providers and set up the backend; versions stay as the lock file has them."""
        self._restore_torn_state()
        backend = BACKEND_FILE if (self.folder / BACKEND_FILE).is_file() else None
        with self.shared_providers() as env:
            what = "Terraform could not be set up"
            self._printing(what, "init", env=env, input=False, reconfigure=FLAG, backend_config=backend)
        if (left := self.folder / ERRORED_FILE).is_file():
            self.reporter.progress("writing the state that an earlier run could not write")
            self._printing(f"the state in {left} could not be written", "state push", ERRORED_FILE)
            left.unlink()

    def plan(
        self,
        *,
        destroy: bool = False,
        adopt: Mapping[str, str] = MappingProxyType({}),
        targets: Sequence[str] = (),
    ) -> Plan:
        """Look at the world and save what there is to do; with ``destroy``, to remove all.

        ``adopt``, address -> id, is there already, and is taken into the state by this plan. ``targets`` are
        the only addresses that it is about, with what they need.
        """
        self._restore_torn_state()
        with _import_blocks(self.folder, adopt):
            code, found = self._events(
                "plan",
                out=PLAN_FILE,
                input=False,
                destroy=FLAG if destroy else None,
                target=[*targets] or None,
                detailed_exitcode=FLAG,
                lock_timeout=_LOCK_TIMEOUT,
            )
        what = "Terraform could not make a plan"
        if code not in (0, _CHANGES):
            raise self.explain(what, found)
        path = self.folder / PLAN_FILE
        digest, shown = file_sha256(path), self._answer(what, "show", PLAN_FILE)
        return Plan(path, digest, read_changes(shown), destroy, outputs_change(shown), tuple(targets))

    def apply(self, plan: Plan) -> None:
        """Apply this very plan; if it is stale, what is left of it, and nothing that it does not show.

        Raises:
            StalePlanError: something else would have to be done by now.
        """
        is_saved = plan.path.is_file() and file_sha256(plan.path) == plan.digest
        if is_saved and self._applied(plan):
            return
        left = self.rest_of(plan)
        if not left.is_empty and not self._applied(left):
            fix = "let others end what they do to this cluster, then run the same command again"
            raise StalePlanError("the state changes while it is worked on", where=str(self.folder), fix=fix)

    def rest_of(self, plan: Plan, *, adopt: Mapping[str, str] = MappingProxyType({})) -> Plan:
        """What is left to do of ``plan``, planned anew; see ``plan`` for ``adopt``.

        Raises:
            StalePlanError: it would do something that ``plan`` does not show.
        """
        left = self.plan(destroy=plan.destroys, adopt=adopt, targets=plan.targets)
        plan.refuse_more(left)
        return left

    def forget(self, module: str) -> None:
        """Take all of a module out of the state: no run of Terraform touches it from then on."""
        what = f"{module} can't be taken out of the state"
        listed = self._printing(what, "state list").split("\n")
        if inside := [one for one in listed if one.startswith((f"{module}.", f"{module}["))]:
            self._printing(what, "state rm", *inside)

    def outputs(self) -> Mapping[str, Any]:
        """The values of the outputs by name, without sensitive ones."""
        answer = self._answer("Terraform's outputs can't be read", "output")
        return {name: output["value"] for name, output in answer.items() if not output["sensitive"]}

    def _applied(self, plan: Plan) -> bool:
        """Apply a plan file; False if it is stale, and nothing was done."""
        code, found = self._events(
            "apply", plan.path.name, parallelism=_PARALLEL, input=False, lock_timeout=_LOCK_TIMEOUT
        )
        if code != 0 and any(d.summary in _STALE for d in found):
            return False
        if code != 0:
            what = "not all could be removed" if plan.destroys else "not all could be made"
            raise self.explain(what, found)
        return True

    def _events(self, verb: str, *words: str, **options: object) -> tuple[int, tuple[Diagnostic, ...]]:
        """Run it with -json and tell its progress; its exit code, and its errors if it failed."""
        found: list[Diagnostic] = []
        other: list[str] = []
        began = time.time()
        with self.run(self._argv(verb, *words, json=FLAG, **options)) as run:
            for line in run.lines():
                if (event := terraform_run.parse_event(line)) is None:
                    other.append(line)
                elif event.get("type") == "diagnostic":
                    found.append(Diagnostic.of(event["diagnostic"]))
                elif (told := terraform_run.progress_of(event)) and (name := self.names(told[0])):
                    self.reporter.progress(f"{name}: {told[1]}")
        if run.code in (0, _CHANGES):
            terraform_run.forget_runs(self.folder)  # it had the lock: no killed run has left one
            return run.code, ()
        printed = "".join(other) + run.stderr
        failed = terraform_run.errors_in(found) or (terraform_run.printed_error(printed, code=run.code),)
        if self._unlocked(failed, began):
            return self._events(verb, *words, **options)
        return run.code, failed

    def _unlocked(self, failed: tuple[Diagnostic, ...], began: float) -> bool:
        """Whether it failed for a lock that a Terraform of ours left behind, and that is released now."""
        if (held := terraform_run.stale_lock(failed, self.folder, before=began)) is None:
            return False
        lock_id, created = held
        self.reporter.progress(
            f"releasing the state lock that a Terraform left behind which was killed ({created})"
        )
        self._printing("the state could not be unlocked", "force-unlock", lock_id, force=FLAG)
        terraform_run.forget_runs(self.folder)
        return True

    def _printing(
        self,
        what: str,
        verb: str,
        *words: str,
        env: Mapping[str, str] = MappingProxyType({}),
        **options: object,
    ) -> str:
        """Run what tells no events: what it prints; its failure is explained after ``what``."""
        with self.run(self._argv(verb, *words, **options), env) as run:
            printed = "".join(run.lines())
        if run.code != 0:
            raise self.explain(what, (terraform_run.printed_error(printed + run.stderr, code=run.code),))
        return printed

    def _answer(self, what: str, verb: str, *words: str) -> Event:
        if (answer := terraform_run.parse_event(self._printing(what, verb, *words, json=FLAG))) is None:
            raise self.explain(what, ())
        return answer

    def _argv(self, verb: str, *words: str, **options: object) -> list[str]:
        if self.program is None:
            self.reporter.progress("looking for Terraform, which is fetched once if there is none")
            self.program = find()
        return command_line(self.program, verb, *words, **options)

    @contextmanager
    def shared_providers(self) -> Iterator[Mapping[str, str]]:
        """The variables with which `init` shares its downloads; one `init` at a time, as Terraform asks."""
        named = [Path(os.environ[name]) for name in _CONFIGURATIONS if name in os.environ]
        own = any(path.is_file() for path in (named or [Path.home() / ".terraformrc"]))
        if own or _PLUGIN_CACHE in os.environ:
            yield {}
            return
        home = cache_home() / "terraform" / "providers"
        home.mkdir(parents=True, exist_ok=True)

        def waiting(text: str) -> None:
            self.reporter.progress(Waiting(text))

        with hold(home / ".lock", "up", what="Terraform's cache of providers", waiting=waiting):
            # Else a provider is taken from there only if the folder's lock file knows its checksum.
            yield {_PLUGIN_CACHE: str(home), "TF_PLUGIN_CACHE_MAY_BREAK_DEPENDENCY_LOCK_FILE": "1"}

    def _restore_torn_state(self) -> None:
        """Put the state of the run before in place of a local state that is torn.

        Terraform writes the file in place: killed in that moment, it leaves an empty file, which it then
        takes for no state at all; on a full disk a part, which it refuses. Where there is no state before,
        none is put in its place. What was made since is found by its name when it is to be made again.
        """
        path = self.folder / STATE_FILE
        backup, errored = self.folder / f"{STATE_FILE}.backup", self.folder / ERRORED_FILE
        if errored.is_file() and not _is_whole(errored):
            errored.unlink()
        has_backup = _is_whole(backup)
        if not path.is_file() or _is_whole(path) or not (has_backup or path.stat().st_size):
            return
        self.reporter.progress("the state was torn when Terraform wrote it: going on from the one before")
        path.rename(self.folder / f"{STATE_FILE}.torn-{time.strftime('%Y%m%dT%H%M%S')}")
        if has_backup:
            write_atomic(path, backup.read_bytes())


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


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


Action = Literal["create", "update", "replace", "delete", "no-op"]

UNKNOWN: Final = "(known after apply)"
_ACTIONS: Final[Mapping[tuple[str, ...], Action]] = {
    ("create",): "create",
    ("update",): "update",
    ("delete",): "delete",
    ("delete", "create"): "replace",
    ("create", "delete"): "replace",
}
_REASONS: Final = {
    "replace_because_tainted": "it was not made to the end",
    "replace_by_request": "it was asked for",
    "replace_by_triggers": "what it depends on changes",
}
# What may come instead of what was shown, when part of it was done: Terraform makes anew what is half made.
_INSTEAD: Final[Mapping[Action, tuple[Action, ...]]] = {
    "create": ("create", "replace", "update", "no-op"),
    "replace": ("replace", "create", "no-op"),
    "update": ("update", "no-op"),
    "delete": ("delete", "no-op"),
    "no-op": ("no-op",),
}


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """What happens to one resource.

    ``before`` and ``after`` are its attributes, None where it is not there. ``why_replaced`` names the
    attributes that can't be changed in place, as paths such as ``boot_disk.0.initialize_params``, or says why
    in words.
    """

    address: str
    type: str
    key: str | int | None
    action: Action
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    why_replaced: tuple[str, ...] = ()
    adopts: str = ""  # the id of what is there already, and is taken into the state


@dataclass(frozen=True, slots=True)
class Plan:
    """A saved plan: ``path`` is the file that ``apply`` takes, ``digest`` its SHA-256.

    ``changes`` has what Terraform would leave as it is, too; ``destroys``: it was made to remove all.
    """

    path: Path
    digest: str
    changes: tuple[ResourceChange, ...]
    destroys: bool = False
    outputs_change: bool = False
    targets: tuple[str, ...] = ()  # it is about these alone

    @property
    def is_empty(self) -> bool:
        return not self.real_changes and not self.outputs_change

    @property
    def real_changes(self) -> tuple[ResourceChange, ...]:
        """Those that are more than `no-op`."""
        return tuple(change for change in self.changes if change.action != "no-op" or change.adopts)

    def refuse_more(self, other: Plan, *, but: str | None = None) -> None:
        """Refuse another plan that changes what this one leaves, or changes it in another way.

        but: what the addresses begin with of which it may do anything. Default: no address.

        Raises:
            StalePlanError: names these changes.
        """
        shown = {change.address: _INSTEAD[change.action] for change in self.real_changes}
        more = (one for one in other.real_changes if one.action not in shown.get(one.address, ()))
        beyond = [f"{o.action} {o.address}" for o in more if but is None or not o.address.startswith(but)]
        if beyond:
            raise StalePlanError(
                "what there is to do has changed since it was shown",
                why="; ".join(beyond),
                fix="see it with `clusterctl plan`, then run the same command again",
            )


def read_changes(shown: Mapping[str, Any]) -> tuple[ResourceChange, ...]:
    """The changes in `terraform show -json PLAN`. What a data source reads is none."""
    raws: Iterable[Mapping[str, Any]] = shown.get("resource_changes") or ()
    return tuple(_change(raw) for raw in raws if raw.get("mode") != "data")


def outputs_change(shown: Mapping[str, Any]) -> bool:
    changes: Mapping[str, Mapping[str, Any]] = shown.get("output_changes") or {}
    return any(change["actions"] != ["no-op"] for change in changes.values())


def _change(raw: Mapping[str, Any]) -> ResourceChange:
    change = raw["change"]
    action = _ACTIONS.get(tuple(change["actions"]), "no-op")
    after = _unknown(change["after"], change.get("after_unknown"))
    deposed = f" (deposed {raw['deposed']})" if raw.get("deposed") else ""
    return ResourceChange(
        address=raw["address"] + deposed,
        type=raw["type"],
        key=raw.get("index"),
        action=action,
        before=change["before"],
        after=after if isinstance(after, Mapping) else None,
        why_replaced=_why(raw, change) if action in ("replace", "delete") else (),
        adopts=(change.get("importing") or {}).get("id") or "",
    )


def _why(raw: Mapping[str, Any], change: Mapping[str, Any]) -> tuple[str, ...]:
    paths: Sequence[Sequence[str | int]] = change.get("replace_paths") or ()
    said = raw.get("action_reason", "")
    reason = "it is no longer asked for" if said.startswith("delete_because") else _REASONS.get(said)
    return tuple(".".join(map(str, path)) for path in paths) or ((reason,) if reason else ())


def _unknown(value: Any, unknown: Any) -> Any:
    """The value, with a word for each part that only applying will tell."""
    if unknown is True:
        return UNKNOWN
    if isinstance(unknown, dict) and isinstance(value, dict | None):
        known = value or {}
        inner = {key: _unknown(known.get(key), mark) for key, mark in unknown.items() if mark}
        return {**known, **inner} if value is not None or inner else value
    if isinstance(unknown, list) and isinstance(value, list):
        marks = [*unknown, *[False] * (len(value) - len(unknown))]
        return [_unknown(inner, mark) for inner, mark in zip(value, marks, strict=False)]
    return value
