"""Terraform of this machine, with small modules of the built-in resource `terraform_data`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from clusterctl.errors import ProvisionError
from clusterctl.providers.gcp.terraform import Terraform
from clusterctl.providers.gcp.terraform_program import TerraformProgram, find
from clusterctl.providers.gcp.terraform_run import Diagnostic, Resource, run
from clusterctl.util.progress import SILENT, HostStep, Reporter

MODULE = """
variable "hosts" { type = map(string) }
variable "seconds" { default = 0 }
variable "pass" {
  sensitive = true
  default   = "hunter2"
}
resource "terraform_data" "node" {
  for_each         = var.hosts
  input            = { kind = each.value, pass = var.pass }
  triggers_replace = [each.value]
  provisioner "local-exec" {
    command = "sleep ${var.seconds}; test ! -e broken-${each.key} || { cat broken-${each.key} >&2; exit 1; }"
  }
}
output "kinds" { value = { for name, kind in var.hosts : name => kind } }
output "pass" {
  value     = var.pass
  sensitive = true
}
"""


class RecordingReporter(Reporter):
    """Keeps the lines that are reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def progress(self, message: str | HostStep) -> None:
        self.lines.append(str(message))

    def note(self, text: str) -> None:
        self.lines.append(text)


@cache
def program() -> TerraformProgram:
    """The one that clusterctl finds here."""
    return find()


def in_state(terraform: Terraform, verb: str, *words: str) -> str:
    """What `terraform state` says in a folder; nothing without a state."""
    argv = [str(find().path), "state", verb, *words]
    return run(argv, terraform.folder, SILENT).stdout


def addresses(terraform: Terraform) -> tuple[str, ...]:
    """What the state holds."""
    return tuple(in_state(terraform, "list").splitlines())


def terraform_in(
    folder: Path, reporter: Reporter = SILENT, chosen: TerraformProgram | None = None
) -> Terraform:
    """Terraform that says failures as they are, and calls resources by their keys.

    The code of a failure is the end of what Terraform could not do: `made`, `plan`, `up`.
    """

    def explain(what: str, found: tuple[Diagnostic, ...]) -> ProvisionError:
        return ProvisionError(
            what, code=what.rsplit(maxsplit=1)[-1], why="\n".join(d.text for d in found)
        )

    def name(resource: Resource) -> str:
        return str(resource.key or resource.type)

    return Terraform(folder, reporter, explain, name, program=chosen)


class Work:
    """A folder with ``MODULE``, Terraform on it, and what it said. Its hosts are set by
    ``hosts``.
    """

    def __init__(self, folder: Path, chosen: TerraformProgram, module: str = MODULE) -> None:
        self.folder = folder
        reporter = RecordingReporter()
        self.said = reporter.lines
        self.terraform = terraform_in(folder, reporter, chosen)
        folder.mkdir(exist_ok=True)
        (folder / "main.tf").write_text(module)

    def hosts(self, *, seconds: float = 0, **kinds: str) -> None:
        """Ask for these hosts, name -> kind; each takes that long to make."""
        variables = {"hosts": kinds, "seconds": seconds}
        (self.folder / "clusterctl.auto.tfvars.json").write_text(json.dumps(variables))

    def break_host(self, name: str, said: str = "out of order") -> None:
        """Making it fails from now on."""
        (self.folder / f"broken-{name}").write_text(said)

    def mend_host(self, name: str) -> None:
        (self.folder / f"broken-{name}").unlink()

    def existing(self) -> set[str]:
        """The hosts that the state has, by name."""
        return {address.partition('"')[2].rstrip('"]') for address in addresses(self.terraform)}
