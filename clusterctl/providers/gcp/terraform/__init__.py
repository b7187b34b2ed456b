"""Terraform, driven: a module goes in; a plan, progress, outputs and typed failures come out."""
