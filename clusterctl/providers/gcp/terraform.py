"""Terraform in a working folder: init, plan, apply of exactly the plan that was shown, outputs,
destroy.

python-terraform knows the module's folder and writes the command lines. ``Runner`` runs them, even
the short ones, because ``python_terraform.Terraform.cmd`` inherits variables such as TF_WORKSPACE
and TF_CLI_ARGS, lets Ctrl-C reach Terraform twice, and holds no lock of the folder.

Terraform's providers are downloaded once and shared, because Google's has about 100 MB. If the user
has a Terraform CLI configuration, which may set mirrors and caches, Terraform uses only that
configuration.
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

import python_terraform

from clusterctl.errors import ProvisionError, StalePlanError
from clusterctl.providers.gcp import terraform_run
from clusterctl.providers.gcp.terraform_program import Program, find
from clusterctl.providers.gcp.terraform_run import Diagnostic, Event, Runner
from clusterctl.state.workspace import cache_home, hold, write_atomic
from clusterctl.util.assets import file_sha256
from clusterctl.util.progress import Waiting

# Called with a description of the failed action, and Terraform's diagnostics. Returns the error to
# raise.
Explain = Callable[[str, tuple[Diagnostic, ...]], ProvisionError]

FLAG: Final = python_terraform.IsFlagged
PLAN_FILE: Final = "plan.tfplan"
STATE_FILE: Final = "terraform.tfstate"
# Terraform writes this file if it can't write the state.
ERRORED_FILE: Final = "errored.tfstate"
BACKEND_FILE: Final = "backend.tfbackend"
# The versions and checksums of the providers that `init` has chosen.
LOCK_FILE: Final = ".terraform.lock.hcl"
_IMPORTS: Final = "clusterctl-adopt.tf.json"
_PLUGIN_CACHE: Final = "TF_PLUGIN_CACHE_DIR"
_CONFIGURATIONS: Final = ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG")
# The exit code of `terraform plan -detailed-exitcode` if there are changes.
_CHANGES: Final = 2
# The number of resources that are created in parallel. Most of the time is waiting.
_PARALLEL: Final = 30
_LOCK_TIMEOUT: Final = "20s"
_STALE: Final = ("Saved plan is stale", "Saved plan does not match the given state")


@dataclass(slots=True)
class Terraform(Runner):
    """Terraform in its working folder: a module, ``*.auto.tfvars.json``, and the state unless it is
    remote.

    explain: makes an error from a failed run's diagnostics. names: a resource's name for users; ""
        hides it.
    program: the executable. Default: found at the first use. Every method raises the error of
    ``explain``, a MachineError without Terraform, or a LockedError while another Terraform runs in
    the folder.
    """

    explain: Explain
    names: Callable[[terraform_run.Resource], str]
    program: Program | None = None

    def init(self) -> None:
        """Download Terraform's providers, in the versions of the lock file, and set up the
        backend.
        """
        self._restore_torn_state()
        backend = BACKEND_FILE if (self.folder / BACKEND_FILE).is_file() else None
        with self.shared_providers() as env:
            options = {"input": False, "reconfigure": FLAG, "backend_config": backend}
            self._run_for_text("Terraform could not be set up", "init", env=env, **options)
        if (errored := self.folder / ERRORED_FILE).is_file():
            self.reporter.progress("writing the state that an earlier run failed to write")
            self._run_for_text(
                f"the state in {errored} could not be written", "state push", ERRORED_FILE
            )
            errored.unlink()

    def plan(
        self,
        *,
        destroy: bool = False,
        adopt: Mapping[str, str] = MappingProxyType({}),
        targets: Sequence[str] = (),
    ) -> Plan:
        """Compare the resources with the module and save the plan. ``destroy``: plan to delete all
        resources.

        adopt: address -> import id of existing resources that the plan imports into the state.
        targets: plan only these addresses and their dependencies. Empty: all addresses.
        """
        self._restore_torn_state()
        with _import_blocks(self.folder, adopt):
            code, diagnostics = self._run_for_events(
                "plan",
                out=PLAN_FILE,
                input=False,
                destroy=FLAG if destroy else None,
                target=[*targets] or None,
                detailed_exitcode=FLAG,
                lock_timeout=_LOCK_TIMEOUT,
            )
        message = "Terraform could not make a plan"
        if code not in (0, _CHANGES):
            raise self.explain(message, diagnostics)
        path = self.folder / PLAN_FILE
        digest = file_sha256(path)
        shown = self._run_for_json(message, "show", PLAN_FILE)
        return Plan(
            path, digest, read_changes(shown), destroy, outputs_change(shown), tuple(targets)
        )

    def apply(self, plan: Plan) -> None:
        """Apply a saved plan. If the plan is stale, apply only those of its changes that are still
        missing.

        Raise a StalePlanError if other changes are necessary, or if another process keeps changing
        the state.
        """
        is_saved = plan.path.is_file() and file_sha256(plan.path) == plan.digest
        if is_saved and self._try_apply(plan):
            return
        remaining = self.plan_remaining(plan)
        if not remaining.is_empty and not self._try_apply(remaining):
            fix = (
                "wait until other users have finished with this cluster, then run the same "
                "command again"
            )
            message = "another process keeps changing Terraform's state"
            raise StalePlanError(message, where=str(self.folder), fix=fix)

    def plan_remaining(
        self, plan: Plan, *, adopt: Mapping[str, str] = MappingProxyType({})
    ) -> Plan:
        """Return a new plan of those changes of an earlier plan that are not done yet.

        adopt: as for ``plan``. Raise a StalePlanError if the new plan has changes that ``plan``
            lacks.
        """
        remaining = self.plan(destroy=plan.destroys, adopt=adopt, targets=plan.targets)
        plan.reject_additions(remaining)
        return remaining

    def forget(self, module: str) -> None:
        """Remove a module's resources from the state, so that Terraform no longer touches them."""
        message = f"{module} could not be removed from the state"
        prefixes = (f"{module}.", f"{module}[")
        addresses = self._run_for_text(message, "state list").split("\n")
        if to_forget := [address for address in addresses if address.startswith(prefixes)]:
            self._run_for_text(message, "state rm", *to_forget)

    def outputs(self) -> Mapping[str, Any]:
        """Return output name -> value, for all outputs of the module that are not sensitive."""
        answer = self._run_for_json("Terraform's outputs could not be read", "output")
        return {name: output["value"] for name, output in answer.items() if not output["sensitive"]}

    def _try_apply(self, plan: Plan) -> bool:
        """Apply a plan file. Return False, with nothing changed, if the plan is stale."""
        code, diagnostics = self._run_for_events(
            "apply", plan.path.name, parallelism=_PARALLEL, input=False, lock_timeout=_LOCK_TIMEOUT
        )
        if code != 0 and any(d.summary in _STALE for d in diagnostics):
            return False
        if code != 0:
            action = "deleted" if plan.destroys else "created or changed"
            message = f"some resources could not be {action}"
            raise self.explain(message, diagnostics)
        return True

    def _run_for_events(
        self, verb: str, *words: str, **options: object
    ) -> tuple[int, tuple[Diagnostic, ...]]:
        """Run Terraform with -json and report progress. Return (exit code, errors if the run
        failed).
        """
        diagnostics: list[Diagnostic] = []
        plain_lines: list[str] = []
        started_at = time.time()
        with self.run(self._argv(verb, *words, json=FLAG, **options)) as run:
            for line in run.lines():
                if (event := terraform_run.parse_event(line)) is None:
                    plain_lines.append(line)
                elif event.get("type") == "diagnostic":
                    diagnostics.append(Diagnostic.of(event["diagnostic"]))
                elif (progress := terraform_run.progress_text(event)) and (
                    name := self.names(progress[0])
                ):
                    self.reporter.progress(f"{name}: {progress[1]}")
        if run.code in (0, _CHANGES):
            # The run had the lock, so that no killed run can have left a lock.
            terraform_run.forget_runs(self.folder)
            return run.code, ()
        printed = "".join(plain_lines) + run.stderr
        errors = terraform_run.errors_in(diagnostics)
        errors = errors or (terraform_run.printed_error(printed, code=run.code),)
        if self._release_stale_lock(errors, started_at):
            return self._run_for_events(verb, *words, **options)
        return run.code, errors

    def _release_stale_lock(self, errors: tuple[Diagnostic, ...], started_at: float) -> bool:
        if (lock := terraform_run.stale_lock(errors, self.folder, before=started_at)) is None:
            return False
        lock_id, created = lock
        self.reporter.progress(
            f"releasing the state lock of a Terraform process that was killed ({created})"
        )
        self._run_for_text("the state could not be unlocked", "force-unlock", lock_id, force=FLAG)
        terraform_run.forget_runs(self.folder)
        return True

    def _run_for_text(
        self,
        message: str,
        verb: str,
        *words: str,
        env: Mapping[str, str] = MappingProxyType({}),
        **options: object,
    ) -> str:
        """Run Terraform without -json and return its output. ``message``: the error if Terraform
        fails.
        """
        with self.run(self._argv(verb, *words, **options), env) as run:
            printed = "".join(run.lines())
        if run.code != 0:
            raise self.explain(
                message, (terraform_run.printed_error(printed + run.stderr, code=run.code),)
            )
        return printed

    def _run_for_json(self, message: str, verb: str, *words: str) -> Event:
        printed = self._run_for_text(message, verb, *words, json=FLAG)
        if (answer := terraform_run.parse_event(printed)) is None:
            raise self.explain(message, ())
        return answer

    def _argv(self, verb: str, *words: str, **options: object) -> list[str]:
        """Return the command line ``terraform verb -option=value… words…`` for the module.

        options: bools, strings, numbers or lists; ``FLAG`` for an option without a value. None: the
            option is left out.
        """
        if self.program is None:
            self.reporter.progress(
                "looking for Terraform (it is downloaded once if it is not installed)"
            )
            self.program = find()
        try:
            module = python_terraform.Terraform(
                working_dir=str(self.folder), terraform_bin_path=str(self.program.path)
            )
        except (OSError, ValueError) as exc:
            # python-terraform reads the state before it runs a command.
            unreadable = Diagnostic("error", "the state can't be read", f"{self.folder}: {exc}")
            raise self.explain("Terraform could not be run", (unreadable,)) from exc
        return [str(word) for word in module.generate_cmd_string(verb, *words, **options)]

    @contextmanager
    def shared_providers(self) -> Iterator[Mapping[str, str]]:
        """Lock the cache of Terraform's providers. Yield variables that make `init` use it."""
        files = [Path(os.environ[name]) for name in _CONFIGURATIONS if name in os.environ]
        has_configuration = any(
            path.is_file() for path in (files or [Path.home() / ".terraformrc"])
        )
        if has_configuration or _PLUGIN_CACHE in os.environ:
            yield {}
            return
        cache = cache_home() / "terraform" / "providers"
        cache.mkdir(parents=True, exist_ok=True)

        def waiting(text: str) -> None:
            self.reporter.progress(Waiting(text))

        with hold(cache / ".lock", "up", what="Terraform's cache of providers", waiting=waiting):
            # Without the second variable, `init` uses the cache only for checksums in the folder's
            # lock file.
            yield {_PLUGIN_CACHE: str(cache), "TF_PLUGIN_CACHE_MAY_BREAK_DEPENDENCY_LOCK_FILE": "1"}

    def _restore_torn_state(self) -> None:
        """Replace a truncated local state file with its backup, or remove it if there is no backup.

        Terraform writes the file in place. If Terraform is killed while it writes, the file may be
        empty, and the next run would start with an empty state. On a full disk, the file is
        incomplete and Terraform rejects it. Resources created since the backup are found when
        Terraform tries to create them again.
        """
        path = self.folder / STATE_FILE
        backup = self.folder / f"{STATE_FILE}.backup"
        errored = self.folder / ERRORED_FILE
        if errored.is_file() and not _is_json_object(errored):
            errored.unlink()
        has_backup = _is_json_object(backup)
        if not path.is_file() or _is_json_object(path) or not (has_backup or path.stat().st_size):
            return
        self.reporter.progress("the state file is truncated; continuing from its backup")
        path.rename(self.folder / f"{STATE_FILE}.torn-{time.strftime('%Y%m%dT%H%M%S')}")
        if has_backup:
            write_atomic(path, backup.read_bytes())


@contextmanager
def _import_blocks(folder: Path, adopt: Mapping[str, str]) -> Iterator[None]:
    """While the body makes a plan, add import blocks to the module. ``adopt``: address -> import
    id.
    """
    path = folder / _IMPORTS
    if adopt:
        blocks = [{"to": address, "id": identity} for address, identity in adopt.items()]
        write_atomic(path, json.dumps({"import": blocks}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _is_json_object(path: Path) -> bool:
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
    "replace_because_tainted": "its creation failed half-way",
    "replace_by_request": "its replacement was requested",
    "replace_by_triggers": "a resource that it depends on changes",
}
# Shown action -> actions that are allowed after a part of the plan was done. Terraform recreates a
# resource whose creation failed.
_ALLOWED_INSTEAD: Final[Mapping[Action, tuple[Action, ...]]] = {
    "create": ("create", "replace", "update", "no-op"),
    "replace": ("replace", "create", "no-op"),
    "update": ("update", "no-op"),
    "delete": ("delete", "no-op"),
    "no-op": ("no-op",),
}


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """The planned change of a resource. ``before``, ``after``: attributes; None: no such resource.

    why_replaced: paths of attributes that can't be changed in place, as
        ``boot_disk.0.initialize_params``, or a reason in words.
    adopts: import id, if the resource exists and is imported into the state.
    """

    address: str
    type: str
    key: str | int | None
    action: Action
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    why_replaced: tuple[str, ...] = ()
    adopts: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A saved plan: ``path`` is the file for ``apply``, ``digest`` its SHA-256.

    changes: all resources, also unchanged ones.
    destroys: the plan deletes all resources.
    targets: the only addresses in the plan. Empty: all.
    """

    path: Path
    digest: str
    changes: tuple[ResourceChange, ...]
    destroys: bool = False
    outputs_change: bool = False
    targets: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.real_changes and not self.outputs_change

    @property
    def real_changes(self) -> tuple[ResourceChange, ...]:
        return tuple(change for change in self.changes if change.action != "no-op" or change.adopts)

    def reject_additions(self, other: Plan, *, except_for: str | None = None) -> None:
        """Raise a StalePlanError, which lists the changes, if another plan has changes that this
        plan lacks.

        except_for: prefix of addresses that the other plan may change. Default: no addresses.
        """
        allowed = {change.address: _ALLOWED_INSTEAD[change.action] for change in self.real_changes}
        added = (c for c in other.real_changes if c.action not in allowed.get(c.address, ()))
        rejected = (c for c in added if except_for is None or not c.address.startswith(except_for))
        if reason := "; ".join(f"{change.action} {change.address}" for change in rejected):
            raise StalePlanError(
                "the plan has changed since it was shown",
                why=f"it would now also {reason}",
                fix="see the new plan with `clusterctl plan`, then run the same command again",
            )


def read_changes(shown: Mapping[str, Any]) -> tuple[ResourceChange, ...]:
    """Return the changes in the output of `terraform show -json PLAN`, without data sources."""
    raws: Iterable[Mapping[str, Any]] = shown.get("resource_changes") or ()
    return tuple(_change(raw) for raw in raws if raw.get("mode") != "data")


def outputs_change(shown: Mapping[str, Any]) -> bool:
    changes: Mapping[str, Mapping[str, Any]] = shown.get("output_changes") or {}
    return any(change["actions"] != ["no-op"] for change in changes.values())


def _change(raw: Mapping[str, Any]) -> ResourceChange:
    change = raw["change"]
    action = _ACTIONS.get(tuple(change["actions"]), "no-op")
    after = _mark_unknown(change["after"], change.get("after_unknown"))
    deposed = f" (deposed {raw['deposed']})" if raw.get("deposed") else ""
    return ResourceChange(
        address=raw["address"] + deposed,
        type=raw["type"],
        key=raw.get("index"),
        action=action,
        before=change["before"],
        after=after if isinstance(after, Mapping) else None,
        why_replaced=_reasons_of(raw, change) if action in ("replace", "delete") else (),
        adopts=(change.get("importing") or {}).get("id") or "",
    )


def _reasons_of(raw: Mapping[str, Any], change: Mapping[str, Any]) -> tuple[str, ...]:
    paths: Sequence[Sequence[str | int]] = change.get("replace_paths") or ()
    action_reason = raw.get("action_reason", "")
    is_unnamed = action_reason.startswith("delete_because")
    reason = "it is no longer in the spec" if is_unnamed else _REASONS.get(action_reason)
    return tuple(".".join(map(str, path)) for path in paths) or ((reason,) if reason else ())


def _mark_unknown(value: Any, unknown: Any) -> Any:
    """Return ``value`` with a placeholder for each part that ``unknown`` marks as not known before
    apply.
    """
    if unknown is True:
        return UNKNOWN
    if isinstance(unknown, dict) and isinstance(value, dict | None):
        attributes = value or {}
        inner = {
            key: _mark_unknown(attributes.get(key), mark) for key, mark in unknown.items() if mark
        }
        return {**attributes, **inner} if value is not None or inner else value
    if isinstance(unknown, list) and isinstance(value, list):
        marks = [*unknown, *[False] * (len(value) - len(unknown))]
        return [_mark_unknown(inner, mark) for inner, mark in zip(value, marks, strict=False)]
    return value
