"""The values of `submit --secret` on a node: who gets them, and when they are removed."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from pydantic import SecretStr

from clusterctl.errors import UsageError
from clusterctl.jobs.prepare import plain_secret_notice, reject_sent_secrets
from clusterctl.jobs.shell import shell_script
from clusterctl.jobs.source import source_of
from clusterctl.scheduler.request.remote_secrets import FILE
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.sites.script import PLAIN
from clusterctl.spec.job import JobSpec
from clusterctl.spec.sweep import Sweep
from clusterctl.transport.base import remote_argv
from clusterctl.util.assets import payload_hash
from payload.node import task
from tests.support.messages import condition, refused
from tests.support.played.batch import (
    HASH,
    Batch,
    play,
    recorded_causes,
    rendered,
    shell_job,
    user_script,
)

VALUE = 'canary=1 "$(id)" \\'
SECRET = {"TOKEN": SecretStr(VALUE)}


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    (tmp_path / "jobs").mkdir()
    return Batch(tmp_path / "jobs")


def send(batch: Batch) -> Path:
    """Write the values of a job as `submit` does. Return their folder."""
    folder = batch.folder.parents[1] / "secrets" / batch.folder.name
    argv = remote_argv("clusterctl.scheduler.request.remote_secrets", str(folder))
    subprocess.run(argv, input=f"TOKEN={VALUE}\0".encode(), check=True)
    return folder


def modes(folder: Path) -> list[int]:
    return [stat.S_IMODE(os.stat(path).st_mode) for path in (folder.parent, folder, folder / FILE)]


def test_values_are_written_for_their_user_only(batch: Batch) -> None:
    assert modes(send(batch)) == [0o700, 0o700, 0o600]
    assert FILE == task.SECRETS


def test_folder_that_leads_elsewhere_is_refused(batch: Batch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "secrets").symlink_to("other")
    argv = remote_argv(
        "clusterctl.scheduler.request.remote_secrets", str(tmp_path / "secrets" / "j")
    )
    refused = subprocess.run(argv, input=b"A=1\0", capture_output=True, check=False)
    assert refused.returncode == 1
    assert not any(path.is_file() for path in (tmp_path / "other").rglob("*"))


def test_ranks_get_the_values_and_srun_does_not(batch: Batch) -> None:
    folder = send(batch)
    play(
        batch.folder.parent / "bin" / "srun",
        'env >>"$SLURM_SUBMIT_DIR/srun-env"; while [[ $1 == -* ]]; do shift; done; exec "$@"',
    )
    text = "import json, os\nprint(json.dumps(os.environ['TOKEN']))\n"
    script = user_script(batch.folder, "ranks.py", text)
    job = JobSpec(name="ranks", script=script, nodes=2, secret=SECRET)
    assert VALUE not in rendered(job)
    rc, out, err = batch.run(rendered(job))
    assert (rc, json.loads(out)) == (0, VALUE), err
    assert "TOKEN" not in (batch.folder / "srun-env").read_text()
    assert not folder.exists()


def test_option_of_the_user_is_not_that_of_a_launcher(batch: Batch) -> None:
    send(batch)
    job = shell_job(batch, 'echo "$1 $TOKEN"', args=("--secrets=conf.yml",), secret=SECRET)
    assert batch.run(rendered(job))[:2] == (0, f"--secrets=conf.yml {VALUE}\n")


def test_shell_script_gets_the_values(batch: Batch) -> None:
    folder = send(batch)
    job = shell_job(batch, 'echo "$TOKEN"; exit 3', secret=SECRET)
    assert batch.run(rendered(job))[:2] == (3, f"{VALUE}\n")
    assert not folder.exists()


def test_shell_gets_the_values_which_are_removed_at_its_start(batch: Batch) -> None:
    folder = send(batch)
    job = JobSpec(name="shell", bundled="probe", folder=False, secret=SECRET)
    text = shell_script(job, PLAIN).replace(payload_hash(), HASH)
    assert "canary" not in text
    # In place of the shell, a program prints its variables.
    rc, out, err = batch.run(re.sub(r'(job\.py shell .*) "\$@"', r"\1 env", text))
    assert rc == 0, err
    assert f"TOKEN={VALUE}\n" in out
    assert not folder.exists()


def test_job_without_its_values_does_not_start(batch: Batch) -> None:
    rc, out, err = batch.run(rendered(shell_job(batch, "echo ran", secret=SECRET)))
    assert (rc, out) == (1, "")
    assert "--secret" in err
    assert recorded_causes(batch.folder) == ["secrets-gone"]


def test_rank_without_its_values_does_not_start(batch: Batch) -> None:
    """Nodes may share no folder, and the values be gone on another node than the first."""
    folder = send(batch)
    play(
        batch.folder.parent / "bin" / "srun",
        f'while [[ $1 == -* ]]; do shift; done; rm -rf "{folder}"; exec "$@"',
    )
    script = user_script(batch.folder, "ranks.py", "print('ran')\n")
    job = JobSpec(name="ranks", script=script, nodes=2, secret=SECRET)
    assert batch.run(rendered(job))[:2] == (1, "")
    assert recorded_causes(batch.folder) == ["secrets-gone"]


@pytest.mark.parametrize(("status", "stays"), [(75, True), (1, True), (2, False), (0, False)])
def test_values_stay_for_the_next_start_of_a_requeued_job(
    batch: Batch, status: int, stays: bool
) -> None:
    folder = send(batch)
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    play(batch.folder.parent / "bin" / "scontrol", "true")
    batch.run(rendered(shell_job(batch, f"exit {status}", requeue=True, secret=SECRET)))
    assert (folder / FILE).exists() is stays


@pytest.mark.parametrize(
    ("reason", "stays"),
    [
        (" DUE TO JOB REQUEUE", True),
        (" DUE TO PREEMPTION", True),
        (" DUE TO TIME LIMIT", False),
        ("", False),
    ],
)
def test_values_stay_if_slurm_itself_starts_the_job_again(
    batch: Batch, tmp_path: Path, reason: str, stays: bool
) -> None:
    folder = send(batch)
    line = f"slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-28T12:00:00{reason} ***"
    text = rendered(shell_job(batch, f"echo '{line}' >&2; exit 1", secret=SECRET))
    # Slurm writes the line to a file.
    log = tmp_path / "stderr.log"
    batch.run(text.replace("#!/bin/bash\n", f"#!/bin/bash\nexec 2>>'{log}'\n", 1))
    assert (folder / FILE).exists() is stays


def test_variable_of_env_that_looks_secret_is_pointed_to_secret() -> None:
    job = JobSpec(name="t", bundled="train", env={"HF_TOKEN": "abc", "LR": "1"})
    notice = plain_secret_notice(job)
    assert notice is not None
    assert (condition(notice), "--secret HF_TOKEN" in notice) == ("env-looks-secret", True)
    assert plain_secret_notice(job.model_copy(update={"env": {"LR": "1"}})) is None


@pytest.mark.parametrize("place", ["file", "argument", "variable", "sweep", "note"])
def test_value_that_would_be_sent_or_recorded_is_refused(tmp_path: Path, place: str) -> None:
    script = user_script(tmp_path, "a.py", "")
    files = {"file": "settings.ini"}.get(place, "other")
    (tmp_path / files).write_text("TOKEN='canary-of-this-test'\n" if place == "file" else "x")
    more = {
        "argument": {"args": ("canary-of-this-test",)},
        "variable": {"env": {"A": "x canary-of-this-test"}},
        "sweep": {"sweep": Sweep.model_validate({"grid": {"a": ["1", "canary-of-this-test"]}})},
        "note": {"note": "canary-of-this-test"},
    }
    secret = {"TOKEN": SecretStr("canary-of-this-test")}
    job = JobSpec(name="a", script=script, secret=secret, **more.get(place, {}))
    with refused("would-send-secret/value", UsageError):
        reject_sent_secrets(job, rendered(job), source_of(Request.read(job)))
    plain = JobSpec(name="a", script=script, secret=secret, exclude=("settings.ini",))
    reject_sent_secrets(plain, rendered(plain), source_of(Request.read(plain)))


def test_packed_tasks_get_the_values_and_srun_does_not(batch: Batch) -> None:
    folder = send(batch)
    play(
        batch.folder.parent / "bin" / "srun",
        'env >>"$SLURM_SUBMIT_DIR/srun-env"; echo "$@" >>"$SLURM_SUBMIT_DIR/srun-env"; exit 1',
    )
    job = shell_job(batch, 'echo "$TOKEN"', array="0-1", pack=True, secret=SECRET)
    batch.run(rendered(job))
    started = (batch.folder / "srun-env").read_text()
    assert f"--secrets={folder}" in started
    assert "canary" not in started


def test_last_task_of_an_array_removes_the_values(batch: Batch) -> None:
    folder = send(batch)
    text = rendered(shell_job(batch, 'echo "$TOKEN"', array="3,5", secret=SECRET))
    batch.environment |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_COUNT": "2"}
    for number, stays in (("5", True), ("3", False)):
        batch.environment["SLURM_ARRAY_TASK_ID"] = number
        assert batch.run(text)[:2] == (0, f"{VALUE}\n")
        assert folder.exists() is stays
