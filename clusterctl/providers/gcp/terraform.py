"""Terraform in a working folder: init, plan, apply of exactly the plan that was shown, outputs,
destroy.

python-terraform writes the command lines. ``terraform_run.run`` runs them, because python-terraform's
``cmd`` inherits variables such as TF_WORKSPACE and TF_CLI_ARGS, lets Ctrl-C reach Terraform twice, and
shows nothing until Terraform has ended.

Terraform's providers are downloaded once and shared, because Google's has about 100 MB. If the user
has a Terraform CLI configuration, which may set mirrors and caches, Terraform uses only that
configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import python_terraform

from clusterctl.errors import Notice, ProvisionError, StalePlanError
from clusterctl.providers.gcp import terraform_run
from clusterctl.providers.gcp.terraform_program import TerraformProgram, find
from clusterctl.providers.gcp.terraform_run import Diagnostic, Event, Resource
from clusterctl.state.workspace import cache_home, hold, write_atomic
from clusterctl.util.assets import file_sha256
from clusterctl.util.progress import LockMessage, Reporter

# Called with a description of the failed action, and Terraform's diagnostics. Returns the error to
# raise.
Explain = Callable[[str, tuple[Diagnostic, ...]], ProvisionError]
# Called with the changes of a plan. Returns address -> import id of resources that the plan creates
# although they exist.
Existing = Callable[[Sequence["ResourceChange"]], Mapping[str, str]]

FLAG: Final = python_terraform.IsFlagged
PLAN_FILE: Final = "plan.tfplan"
STATE_FILE: Final = "terraform.tfstate"
# The versions and checksums of the providers that `init` has chosen.
LOCK_FILE: Final = ".terraform.lock.hcl"
_IMPORTS: Final = "clusterctl-adopt.tf.json"
_PLUGIN_CACHE: Final = "TF_PLUGIN_CACHE_DIR"
_CONFIGURATIONS: Final = ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG")
# The exit code of `terraform plan -detailed-exitcode` if there are changes.
_CHANGES: Final = 2
# The number of resources that are created in parallel. Most of the time is waiting. providers.tf
# goes by it.
_PARALLEL: Final = 100
# The Terraform of a killed clusterctl releases the lock within this time.
_LOCK_TIMEOUT: Final = f"{terraform_run.GRACE_S}s"
_STALE: Final = ("Saved plan is stale", "Saved plan does not match the given state")
_INTERRUPTED: Final = (
    "Terraform was interrupted. What it was creating is not in its state, but Google keeps creating "
    "and billing it: `clusterctl up` finds it and continues, `clusterctl down` removes it"
)
_INTERRUPTED_DOWN: Final = (
    "Terraform was interrupted. Google keeps billing what is not deleted yet: `clusterctl down` "
    "deletes the rest"
)
_NO_PLAN: Final = "Terraform could not make a plan"


@dataclass(slots=True)
class Terraform:
    """Terraform in its working folder: a module, ``*.auto.tfvars.json``, and the state unless it is
    remote.

    explain: makes an error from a failed run's diagnostics. names: a resource's name for users; ""
        hides it.
    existing: finds resources that exist although a plan creates them; they are imported instead.
    program: the executable. Default: found at the first use. Every method raises the error of
    ``explain``, a ProvisionError if the state can't be read, or a MachineError without Terraform.
    """

    folder: Path
    reporter: Reporter
    explain: Explain
    names: Callable[[Resource], str]
    existing: Existing = lambda _: {}
    program: TerraformProgram | None = None

    def init(self) -> None:
        """Download Terraform's providers, in the versions of the lock file, and set up the
        backend.
        """
        with self.shared_providers() as env:
            options = {"input": False, "reconfigure": FLAG}
            self._run_for_text("Terraform could not be set up", "init", env=env, **options)

    def plan(self, *, destroy: bool = False, targets: Sequence[str] = ()) -> TerraformPlan:
        """Compare the resources with the module and save the plan.

        destroy: plan to delete all resources.
        targets: plan only these addresses and their dependencies. Empty: all addresses.
        """
        plan = self._plan(destroy, targets, {})
        if existing := self.existing(plan.changes):
            found = [
                Resource(c.address, c.type, c.key) for c in plan.changes if c.address in existing
            ]
            names = ", ".join(dict.fromkeys(filter(None, map(self.names, found))))
            self.reporter.progress(f"exists already and is imported: {names}")
            plan = self._plan(destroy, targets, existing)
        return plan

    def _plan(
        self, destroy: bool, targets: Sequence[str], adopt: Mapping[str, str]
    ) -> TerraformPlan:
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
        if code not in (0, _CHANGES):
            raise self.explain(_NO_PLAN, diagnostics)
        path = self.folder / PLAN_FILE
        digest = file_sha256(path)
        shown = self._run_for_json(_NO_PLAN, "show", PLAN_FILE)
        return TerraformPlan(
            path, digest, read_changes(shown), destroy, outputs_change(shown), tuple(targets)
        )

    def apply(self, plan: TerraformPlan) -> None:
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
        self, plan: TerraformPlan, *, except_for: str | None = None
    ) -> TerraformPlan:
        """Return a new plan of those changes of an earlier plan that are not done yet.

        Raise a StalePlanError if the new plan has changes that ``plan`` lacks, except for addresses
        with this prefix.
        """
        remaining = self.plan(destroy=plan.destroys, targets=plan.targets)
        plan.reject_additions(remaining, except_for=except_for)
        return remaining

    def outputs(self) -> Mapping[str, Any]:
        """Return output name -> value, for all outputs of the module that are not sensitive."""
        answer = self._run_for_json("Terraform's outputs could not be read", "output")
        return {name: output["value"] for name, output in answer.items() if not output["sensitive"]}

    def _try_apply(self, plan: TerraformPlan) -> bool:
        """Apply a plan file. Return False, with nothing changed, if the plan is stale."""
        options = {"parallelism": _PARALLEL, "input": False, "lock_timeout": _LOCK_TIMEOUT}
        try:
            code, diagnostics = self._run_for_events("apply", plan.path.name, **options)
        except (KeyboardInterrupt, SystemExit):
            text = _INTERRUPTED_DOWN if plan.destroys else _INTERRUPTED
            self.reporter.note(Notice("terraform-interrupted", text))
            raise
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

        def hear(line: str) -> None:
            if (event := terraform_run.parse_event(line)) is None:
                plain_lines.append(line)
            elif event.get("type") == "diagnostic":
                diagnostics.append(Diagnostic.of(event["diagnostic"]))
            elif (progress := terraform_run.progress_text(event)) and (
                name := self.names(progress[0])
            ):
                self.reporter.progress(f"{name}: {progress[1]}")

        argv = self._argv(verb, *words, json=FLAG, **options)
        result = terraform_run.run(argv, self.folder, self.reporter, heard=hear)
        if result.rc in (0, _CHANGES):
            return result.rc, ()
        errors = terraform_run.errors_in(diagnostics)
        printed = "\n".join([*plain_lines, result.stderr])
        return result.rc, errors or (terraform_run.printed_error(printed, code=result.rc),)

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
        argv = self._argv(verb, *words, **options)
        result = terraform_run.run(argv, self.folder, self.reporter, env=env)
        if result.rc != 0:
            printed = result.stdout + result.stderr
            raise self.explain(message, (terraform_run.printed_error(printed, code=result.rc),))
        return result.stdout

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
        state = self.folder / STATE_FILE
        # A killed Terraform may leave an empty file. For Terraform this is no state, and
        # python-terraform, which reads the state first, must not see it.
        is_empty = state.is_file() and not state.stat().st_size
        try:
            module = python_terraform.Terraform(
                working_dir=str(self.folder),
                state="none" if is_empty else None,
                terraform_bin_path=str(self.program.path),
            )
        except (OSError, ValueError) as exc:
            raise ProvisionError(
                "Terraform's state can't be read",
                code="record-damaged",
                about="terraform-state",
                where=str(state),
                why=str(exc),
                fix=f"replace the file by {STATE_FILE}.backup, or remove both: `clusterctl up` then "
                "finds at Google what the cluster has",
            ) from exc
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
            self.reporter.progress(LockMessage(text))

        with hold(cache / ".lock", "up", what="Terraform's cache of providers", waiting=waiting):
            # Without the second variable, `init` uses the cache only for checksums in the folder's
            # lock file.
            yield {_PLUGIN_CACHE: str(cache), "TF_PLUGIN_CACHE_MAY_BREAK_DEPENDENCY_LOCK_FILE": "1"}


@contextmanager
def _import_blocks(folder: Path, adopt: Mapping[str, str]) -> Iterator[None]:
    """While the body makes a plan, add import blocks to the module. ``adopt``: address -> import
    id.
    """
    path = folder / _IMPORTS
    # A killed clusterctl leaves its file, and its resources may be gone.
    path.unlink(missing_ok=True)
    if adopt:
        blocks = [{"to": address, "id": identity} for address, identity in adopt.items()]
        write_atomic(path, json.dumps({"import": blocks}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


Action = Literal["create", "update", "replace", "delete", "no-op"]

UNKNOWN: Final = "(known after apply)"
_ACTIONS: Final[Mapping[tuple[str, ...], Action]] = {
    ("create",): "create",
    ("update",): "update",
    ("delete",): "delete",
    ("delete", "create"): "replace",
    ("create", "delete"): "replace",
}
TAINTED: Final = "its creation failed half-way"
_REASONS: Final = {
    "replace_because_tainted": TAINTED,
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
class TerraformPlan:
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

    def reject_additions(self, other: TerraformPlan, *, except_for: str | None = None) -> None:
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
