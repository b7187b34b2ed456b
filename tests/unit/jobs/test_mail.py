"""A job that asks Slurm for mails is told if its cluster sends none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.jobs.prepare import mail_notice
from clusterctl.scheduler.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.spec.job import JobSpec
from tests.support.inventories import inventory_of
from tests.support.scripted import ScriptedTransport, Step

CONFIG = "MailDomain              = (null)\nMailProg                = /bin/mail\n"


def controller(config: str = CONFIG, has_program: int = 1) -> ScriptedTransport:
    """has_program: the exit status of `test -x`."""
    return ScriptedTransport(
        [
            Step(("scontrol", "show", "config"), stdout=config),
            Step(("test", "-x", "/bin/mail"), rc=has_program),
        ]
    )


def job_of(tmp_path: Path, *slurm: str, lines: str = "") -> Request:
    script = tmp_path / "m.sh"
    script.write_text(f"#!/bin/bash\n{lines}\ndate\n")
    return Request.read(JobSpec(name="m", script=script, slurm=slurm))


@pytest.mark.parametrize(
    ("slurm", "lines"),
    [
        ((), "#SBATCH --mail-type=END,FAIL"),
        (("--mail-type=END",), ""),
        (("--mail-type=ALL",), "#SBATCH --mail-type=NONE"),
    ],
)
def test_job_that_asks_for_mails_is_told_that_none_is_sent(
    tmp_path: Path, slurm: tuple[str, ...], lines: str
) -> None:
    jobs = [job_of(tmp_path, *slurm, lines=lines)]
    notice = mail_notice(site_of(inventory_of()), controller(), jobs)
    assert notice is not None
    assert (notice.code, "/bin/mail" in notice) == ("no-mail", True)


@pytest.mark.parametrize(
    ("slurm", "asked"),
    [
        ((), ScriptedTransport([])),
        (("--mail-type=NONE",), ScriptedTransport([])),
        (("--mail-user=a@example.org",), ScriptedTransport([])),
        (("--mail-type=END",), controller(has_program=0)),
        (("--mail-type=END",), controller(config="")),
    ],
)
def test_nothing_is_noted_without_a_request_or_with_a_program_for_mails(
    tmp_path: Path, slurm: tuple[str, ...], asked: ScriptedTransport
) -> None:
    assert mail_notice(site_of(inventory_of()), asked, [job_of(tmp_path, *slurm)]) is None


def test_mails_of_a_cluster_of_other_people_are_theirs(tmp_path: Path) -> None:
    site = site_of(replace(inventory_of(), is_foreign=True))
    jobs = [job_of(tmp_path, "--mail-type=END")]
    assert mail_notice(site, ScriptedTransport([]), jobs) is None
