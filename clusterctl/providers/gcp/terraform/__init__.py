"""Terraform, driven: a module goes in; a plan, progress, outputs and typed failures come out."""

from clusterctl.providers.gcp.terraform.client import BACKEND_FILE, Explain, Terraform
from clusterctl.providers.gcp.terraform.events import Diagnostic, Resource
from clusterctl.providers.gcp.terraform.plan import Action, Plan, ResourceChange

__all__ = [
    "BACKEND_FILE",
    "Action",
    "Diagnostic",
    "Explain",
    "Plan",
    "Resource",
    "ResourceChange",
    "Terraform",
]
