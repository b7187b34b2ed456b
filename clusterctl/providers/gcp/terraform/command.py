"""Terraform's argv, as python-terraform writes it; nothing else imports that library.

What it is used for is what it does well: the words of a command. Running is ours, since its ``cmd`` hands on
stdin, reads the whole state afterwards, hides progress, and logs outputs, secrets included; a method that it
does not know becomes a subcommand; its defaults for ``plan``, ``apply`` and ``destroy`` are Terraform 0.12's.
"""

from __future__ import annotations

from typing import Final

import python_terraform

from clusterctl.providers.gcp.terraform.program import Program

FLAG: Final = python_terraform.IsFlagged

# It looks for a state to read in its working folder, even to write an argv: give it one without.
_NO_FOLDER: Final = "/dev/null"


def argv(program: Program, verb: str, *words: str, **options: object) -> list[str]:
    """``program verb -option=value… words…``; ``FLAG`` is an option without a value, None leaves it out.

    Options are on or off, texts, numbers or lists of them. A mapping would become a file that stays:
    variables belong into ``*.auto.tfvars.json``.
    """
    writer = python_terraform.Terraform(working_dir=_NO_FOLDER, terraform_bin_path=str(program.path))
    return [str(word) for word in writer.generate_cmd_string(verb, *words, **options)]
