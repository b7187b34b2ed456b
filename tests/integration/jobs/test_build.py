"""`submit --build` and `--module`: what a job does on its first node before its program starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.jobs.source import Item, manifest
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.checks import check_build
from clusterctl.scheduler.sites.script import Environment, render_script
from clusterctl.spec.job import JobSpec
from clusterctl.util.assets import file_sha256
from payload.node.build import key_of
from tests.support.inventories import inventory_with
from tests.support.played.batch import (
    HASH,
    INVENTORY,
    Batch,
    play,
    recorded_causes,
    rendered,
    shell_job,
)

# Counts its calls in the folder above the jobs' folders.
COMMAND = (
    'echo x >>"$SLURM_SUBMIT_DIR/../../calls"; cp source program; chmod +x program; mkdir -p out; '
    "ln -sf ../program out/link"
)


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    (tmp_path / "jobs").mkdir()
    return Batch(tmp_path / "jobs")


def again(batch: Batch, name: str, source: str) -> Path:
    """Give the batch a new folder of a job with these files. Return the folder of the program."""
    batch.folder = batch.folder.parent / name
    (batch.folder / "files").mkdir(parents=True)
    (batch.folder / "files" / "source").write_text(source)
    batch.environment["SLURM_SUBMIT_DIR"] = str(batch.folder)
    return batch.folder / "files"


def job_of(batch: Batch, files: Path, body: str, **fields: object) -> JobSpec:
    job = shell_job(batch, body, **{"build": COMMAND, **fields})
    (files / "my job.sh").write_text((batch.folder / "my job.sh").read_text())
    paths = sorted(files.iterdir())
    items = [item for path in paths if (item := Item.of(path.name, path, path.lstat()))]
    hashes = {path: file_sha256(path) for path in paths}
    (batch.folder / "source.json").write_bytes(manifest(items, hashes))
    return job


def calls(batch: Batch) -> int:
    path = batch.folder.parents[1] / "calls"
    return path.read_text().count("x") if path.exists() else 0


def test_equal_files_are_built_once_and_others_again(batch: Batch) -> None:
    for name, source, count in (
        ("a-1", "#!/bin/sh\necho one\n", 1),
        ("a-2", "#!/bin/sh\necho one\n", 1),
        ("a-3", "#!/bin/sh\necho two\n", 2),
    ):
        files = again(batch, name, source)
        job = job_of(batch, files, "./program && out/link")
        rc, out, err = batch.run(rendered(job))
        assert (rc, out) == (0, f"{source.split()[-1]}\n" * 2), err
        assert calls(batch) == count
        # A restart finds the program, and may have changed it.
        (files / "program").write_text("#!/bin/sh\necho own\n")
        assert batch.run(rendered(job))[1] == "own\nown\n"
        assert calls(batch) == count


def test_build_that_opens_its_output_anew_does_not_empty_its_log(batch: Batch) -> None:
    files = again(batch, "a-1", "#!/bin/sh\necho one\n")
    build = "echo first; echo second >/dev/stderr; false"
    job = job_of(batch, files, "./program", build=build)
    rc, _, err = batch.run(rendered(job))
    assert rc == 1
    assert err.splitlines()[:2] == ["first", "second"]


def test_another_environment_or_gpu_is_another_build(batch: Batch) -> None:
    script = batch.payload / HASH / "payload" / "node" / "build.py"
    gpus = batch.folder.parent / "gpus"
    script.write_text(script.read_text().replace("/proc/driver/nvidia/gpus", str(gpus)))
    for number, (environment, model, count) in enumerate(
        (("a", "", 1), ("a", "", 1), ("b", "", 2), ("b", "NVIDIA L4", 3), ("b", "NVIDIA L4", 3))
    ):
        if model:
            (gpus / "0000:01:00.0").mkdir(parents=True, exist_ok=True)
            (gpus / "0000:01:00.0" / "information").write_text(f"Model: \t\t {model}\n")
        files = again(batch, f"a-{number}", "#!/bin/sh\necho one\n")
        job = job_of(batch, files, "./program")
        prefix = Environment(prefix=f"{batch.folder.parent}/{environment}")
        text = render_script(INVENTORY, Request.read(job), payload_hash=HASH, environment=prefix)
        assert batch.run(text)[:2] == (0, "one\n")
        assert calls(batch) == count


@pytest.mark.parametrize(
    "record",
    [
        "conda-meta/zlib-1.3-0.json",
        "lib/python3.13/site-packages/six-1.17.dist-info/RECORD",
        "lib/R/library/dplyr/DESCRIPTION",
        "modulefile",
    ],
)
def test_environment_that_was_changed_in_its_place_is_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    monkeypatch.setenv("CLUSTERCTL_PATH", f"{tmp_path}/bin:/usr/bin")
    monkeypatch.setenv("_LMFILES_", f"{tmp_path}/modulefile")
    (tmp_path / "bin").mkdir()
    keys = [key_of({"build": "make"}, "")]
    file = tmp_path / record
    file.parent.mkdir(parents=True, exist_ok=True)
    for text in ("1", "2"):
        file.write_text(text)
        # A clock of the file system may not have advanced between the two.
        os.utime(file, ns=(int(text), int(text)))
        keys.append(key_of({"build": "make"}, ""))
    assert len(set(keys)) == 3
    assert key_of({"build": "make"}, "") == keys[-1]


@pytest.mark.parametrize("edit", ["changed", "added", "unlisted"])
def test_edited_folder_is_built_again_by_another_job(batch: Batch, edit: str) -> None:
    """A user may edit a job's files on the cluster, and call `sbatch job.sbatch` there."""
    batch.environment["SLURM_JOB_ID"] = "1"
    files = again(batch, "a-1", "#!/bin/sh\necho one\n")
    text = rendered(job_of(batch, files, "./program"))
    assert batch.run(text)[:2] == (0, "one\n")
    (kept,) = (batch.folder.parents[1] / "builds").iterdir()
    (files / "program").unlink()
    (files / "out" / "link").unlink()
    time = os.stat(files / "source")
    if edit == "changed":
        # An edit of the same size, whose time tells nothing.
        (files / "source").write_text("#!/bin/sh\necho two\n")
        os.utime(files / "source", ns=(time.st_atime_ns, time.st_mtime_ns))
    elif edit == "added":
        (files / "header.h").touch()
    else:
        (batch.folder / "source.json").unlink()
    batch.environment["SLURM_JOB_ID"] = "2"
    assert batch.run(text)[:2] == (0, "two\n" if edit == "changed" else "one\n")
    assert calls(batch) == 2
    assert [*kept.parent.iterdir()] == [kept]
    assert (kept / "program").read_text() == "#!/bin/sh\necho one\n"


def test_build_that_can_not_be_copied_ends_the_job_and_leaves_no_part(batch: Batch) -> None:
    program = "#!/bin/sh\necho one\nexit\n" + 5000 * "#"
    files = again(batch, "a-1", program)
    assert batch.run(rendered(job_of(batch, files, "./program")))[:2] == (0, "one\n")
    files = again(batch, "a-2", program)
    text = rendered(job_of(batch, files, "./program"))
    # As on a full disk, the copy of the program ends after 4 KiB.
    rc, out, err = batch.run(text.replace("#!/bin/bash\n", "#!/bin/bash\nulimit -f 4\n", 1))
    assert (rc, out) == (1, "")
    assert "Traceback" not in err
    assert "clusterctl: the program can't be built on node-1: " in err
    assert {path.name for path in files.iterdir()} <= {"my job.sh", "source", "out"}


def test_program_in_c_is_built_by_make(batch: Batch) -> None:
    files = again(batch, "a-1", "")
    (files / "a.c").write_text('#include <stdio.h>\nint main() { return puts("from C") < 0; }\n')
    (files / "Makefile").write_text("a: a.c\n\tcc -o a a.c\n")
    job = job_of(batch, files, "./a", build="make -j2")
    assert batch.run(rendered(job))[:2] == (0, "from C\n")
    (kept,) = (batch.folder.parents[1] / "builds").iterdir()
    assert [path.name for path in kept.iterdir()] == ["a"]


def test_tasks_of_an_array_share_a_build(batch: Batch) -> None:
    files = again(batch, "a-1", "#!/bin/sh\necho one\n")
    job = job_of(batch, files, "./program", array="1-2")
    batch.environment["SLURM_ARRAY_JOB_ID"] = "12"
    for number in ("1", "2"):
        batch.environment["SLURM_ARRAY_TASK_ID"] = number
        assert batch.run(rendered(job))[:2] == (0, "one\n")
    assert calls(batch) == 1


def test_failed_build_ends_the_job_with_its_last_lines(batch: Batch) -> None:
    files = again(batch, "a-1", "")
    command = "echo before; echo main.f90:3: Error; exit 4"
    job = job_of(batch, files, "echo ran", build=command, requeue=True)
    rc, out, err = batch.run(rendered(job))
    assert (rc, out) == (4, "")
    assert "main.f90:3: Error" in err
    assert err.endswith(f"clusterctl: --build {command} failed on node-1 with exit code 4\n")
    assert recorded_causes(batch.folder) == ["build-failed"]
    assert "before" in (batch.folder / "build.log").read_text()
    assert not (batch.folder.parents[1] / "builds").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_loaded_in_order_or_end_the_job(
    batch: Batch, tmp_path: Path, *, fails: bool
) -> None:
    play(tmp_path / "jobs" / "bin" / "say-modules", 'echo "$LOADED"')
    define = 'module() { [[ $2 != bad ]] && export LOADED="${LOADED:-} $2"; }\n'
    job = shell_job(batch, "say-modules", module=("gcc/12", *(["bad"] if fails else []), "mpi"))
    text = rendered(job).replace("#!/bin/bash\n", f"#!/bin/bash\n{define}", 1)
    rc, out, err = batch.run(text)
    assert (rc, out) == ((1, "") if fails else (0, " gcc/12 mpi\n"))
    assert ("can't load the environment module bad" in err) is fails
    assert recorded_causes(batch.folder) == (["module-not-loaded"] if fails else [])


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (JobSpec(name="t", bundled="train", build="make"), "options-exclusive"),
        (
            JobSpec(name="t", script=Path("a.sh"), build="make", container="/x.sif"),
            "options-exclusive",
        ),
    ],
)
def test_build_that_nothing_could_use_is_refused(job: JobSpec, code: str) -> None:
    faults = check_build(site_of(inventory_with()), Request(job))
    assert [fault.code for fault in faults] == [code]
