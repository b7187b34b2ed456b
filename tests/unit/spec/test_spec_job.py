"""The flags of `submit`: what they mean, and one error that names all the wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clusterctl.errors import UsageError
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.job_options import OPTIONS, JobOptions, job_options
from clusterctl.spec.names import Launcher
from clusterctl.spec.program import Language, language_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(target: str = "train", **flags: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        job_spec(target, flags)
    assert caught.value.exit_code == 2
    assert "Input should" not in str(caught.value)
    return caught.value


def test_bundled_job_has_its_defaults() -> None:
    job = job_spec("train", {})
    assert (job.name, job.bundled, job.script) == ("train", "train", None)
    assert (job.nodes, job.tasks_per_node, job.launcher) == (1, 1, Launcher.SRUN)
    assert (job.mem, job.time) == (None, None)


def test_job_has_the_options_of_the_model_and_their_defaults() -> None:
    job = JobSpec(name="a", bundled="train")
    for name, one in JobOptions.model_fields.items():
        assert name == "name" or getattr(job, name) == one.default
    target = {"bundled": "train", "script": None, "run_module": None, "project": None, "secret": ()}
    assert job.record == {**job_options({"name": "a"}).model_dump(), **target}
    full = {
        "mem": "4G",
        "time": "90",
        "chain": "7d",
        "sweep": ["lr=1,2"],
        "env": ["A=1"],
        "requirements": "/r.txt",
    }
    record = JobSpec(name="a", bundled="train", **full).record
    assert record == {**job_options({"name": "a", **full}).model_dump(), **target}


@pytest.mark.parametrize(
    ("flag", "value", "code"),
    [
        *(("nodes", number, "out-of-range") for number in (0, 70_000)),
        ("nodes", "two", "wrong-type"),
        ("tasks_per_node", -1, "out-of-range"),
        ("cpus", 0, "out-of-range"),
        ("gpus", -1, "out-of-range"),
        ("signal", "KILL@60", "bad-format"),
        ("signal", "USR1@65536", "signal-too-early"),
        *(
            ("stage", [text], "stage-form")
            for text in ("/a", "a:/b", "/a:b", "/a:/b:/c", "/a:/", "/a:", "$A:/b", "/a:by-node")
        ),
        ("stage", ["/a:/x", "/b:/y/../x"], "stage-twice"),
        ("stage", ["/a:/x:by-node", "/b:/x/y:by-node"], "stage-twice"),
        ("stage", ["/a:/x/y", "/b:/x"], "stage-twice"),
        ("stage", ["/a:/a/b"], "stage-inside"),
        ("stage", ["/a:/b/../a"], "stage-inside"),
        ("mem", "lots", "not-a-memory-size"),
        ("mem", "0", "size-too-small"),
        ("time", "soon", "not-a-time"),
        *(("time", text, "no-time-limit") for text in ("UNLIMITED", "infinite", "0", "0:00")),
        ("time", "0s", "duration-zero"),
        ("array", "[1-3", "bad-format"),
        ("array", "[1-3]:2", "bad-format"),
        ("chain", "0", "duration-zero"),
        ("chain", "UNLIMITED", "not-a-time"),
        ("partition", "a queue", "bad-format"),
        ("account", "a b", "bad-format"),
        ("qos", "$(id)", "bad-format"),
        ("constraint", "a;b", "bad-format"),
        ("array", "0-", "bad-format"),
        *(("array", text, "array-range") for text in ("5-1", "0-9:0")),
        ("array", "0-9%0", "array-runs-nothing"),
        ("launcher", "mpiexec", "unknown-value"),
        *(("name", text, "bad-format") for text in ("-rf", "")),
        *(("env", [f"{name}=1"], "not-a-variable-name") for name in ("2x", "")),
        *(("env", [f"{name}=1"], "variable-reserved") for name in ("SLURM_NTASKS", "PATH")),
        ("env", ["NOT_SET_HERE"], "variable-without-value"),
        ("env", ["A=\0"], "null-byte"),
        ("container", "docker://Python:3.12", "not-an-image"),
        ("container", "library://python:3.12", "not-an-image"),
        ("mount", ["data"], "mount-form"),
        ("mount", ["/data:relative"], "mount-form"),
        ("mount", ["/data:/data:rx"], "mount-form"),
        ("mount", ["/a,/b:/data"], "mount-form"),
        ("container", "here/not.sif", "no-such-file"),
        ("container", ".", "not-an-image"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_flag_is_named(flag: str, value: object, code: str) -> None:
    error = refused(**{flag: value})
    assert error.about == code
    assert error.what.startswith(OPTIONS[flag].flag.removesuffix("="))
    shown = (
        str(value[0]).removesuffix("=1").removeprefix("A=")
        if isinstance(value, list)
        else str(value)
    )
    assert repr(shown)[1:-1] in error.what


def test_descending_range_of_an_array_names_the_ascending_one() -> None:
    assert "1-5" in refused(array="5-1").what


def test_null_byte_in_the_arguments_is_refused() -> None:
    error = refused(args=["a\0b"])
    assert error.about == "null-byte"
    assert r"'a\x00b'" in error.what


def test_image_is_a_local_file_or_a_path_on_the_cluster(folder: Path) -> None:
    (folder / "x.sif").touch()
    assert job_spec("train", {"container": "x.sif"}).container == str(folder / "x.sif")
    for path in ("/images/y.sif", "~/no such image.sif"):
        assert job_spec("train", {"container": path}).container == path


def test_argument_that_is_not_text_is_refused() -> None:
    error = refused(args=["\udcff"])
    assert error.about == "not-utf8"
    assert " -- " not in error.what


def test_wrong_flags_are_reported_together() -> None:
    error = refused(nodes=0, time="soon", array="x")
    assert error.about == "flags"
    assert {failure.cause.split(" ")[0].rstrip(":") for failure in error.failures} == {
        "--nodes",
        "--time",
        "--array",
    }
    assert all(failure.cause in str(error) for failure in error.failures)


@pytest.mark.parametrize(
    ("file", "content", "python"),
    [
        ("a.sh", "echo\n", False),
        ("a.bash", "", False),
        ("a.py", "print()\n", True),
        ("a", "#!/bin/bash\n", False),
        ("a", "#! /bin/sh -e\n", False),
        ("a", "#!/usr/bin/env bash\n", False),
        ("a", "#!/usr/bin/env python3\n", True),
        ("a", "#!/opt/py/bin/python3.11\n", True),
        ("a.sbatch", "#!/bin/bash\n#SBATCH -N 2\n", False),
        ("a.R", "cat(1)\n", False),
        ("a.pl", "print 1;\n", False),
        ("a", "#!/usr/bin/env Rscript\n", False),
        ("a", "#!/usr/bin/perl -w\n", False),
        ("a.csh", "#!/bin/tcsh\n", False),
        ("a.js", "#!/usr/bin/env -S node --no-warnings\n", False),
        ("a.sh", "#!/usr/bin/env -S uv run --script\n", False),
        ("a", "#!/usr/bin/env -S uv run --script\n", True),
        ("a", "#!/usr/bin/env -S uv run -q --script\n", True),
        ("a", "#!/usr/bin/env -S pipx run\n", True),
    ],
)
def test_job_of_a_script_path_is_that_script(
    folder: Path, file: str, content: str, python: bool
) -> None:
    (folder / file).write_text(content)
    job = job_spec(f"./{file}", {})
    assert job.script == folder / file
    assert job.bundled is None
    assert (language_of(folder / file) is Language.PYTHON) is python


@pytest.mark.parametrize(
    "content",
    [b"", b"hello\n", b"# !/usr/bin/perl\n", b"\x7fEL\x02", b"#SBATCH --nodes=2\nsrun hostname\n"],
)
def test_file_that_is_not_a_script_is_refused(folder: Path, content: bytes) -> None:
    (folder / "a").write_bytes(content)
    assert refused("a").about == "script"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("nb.ipynb", "jupyter nbconvert --to script nb.ipynb"),
        ("Makefile", "make -f Makefile"),
        ("GNUmakefile", "make -f GNUmakefile"),
        ("heat.c", "srun ./PROGRAM"),
        ("heat.F90", "srun ./PROGRAM"),
        ("kernel.cu", "srun ./PROGRAM"),
        ("image.sif", "--container image.sif"),
        ("y.slurm", "first line"),
        ("my nb.ipynb", "--to script 'my nb.ipynb'"),
    ],
)
def test_file_that_is_not_a_script_has_the_fix_of_its_kind(
    folder: Path, name: str, fix: str
) -> None:
    (folder / name).write_text("all:\n")
    error = refused(name)
    assert (error.about, fix in error.fix) == ("script", True), error.fix


def test_compiled_program_is_started_by_a_script(folder: Path) -> None:
    (folder / "a").write_bytes(b"\x7fELF\x02")
    error = refused("a")
    assert error.about == "script"
    assert error.fix.endswith("srun ./a")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my job.sh", "my-job"),
        ("-rf.sh", "rf"),
        ("x" * 90 + ".py", "x" * 64),
        ("é.sh", "job"),
        ("a.b.sh", "a.b"),
    ],
)
def test_job_name_is_the_script_name_in_safe_characters(folder: Path, file: str, name: str) -> None:
    (folder / file).write_text("")
    assert job_spec(f"./{file}", {}).name == name


def test_bundled_name_wins_over_a_file(folder: Path) -> None:
    (folder / "train").write_text("#!/bin/sh\n")
    assert job_spec("train", {}).bundled == "train"
    assert job_spec("./train", {}).script == folder / "train"
    assert job_spec("./train", {}).name == "train"


def test_missing_script_in_a_missing_folder(folder: Path) -> None:
    assert refused("no/where/a.sh").about == "bundled-job"


def test_folder_as_job_is_refused(folder: Path) -> None:
    (folder / "jobs").mkdir()
    assert refused("jobs").code == "file-unreadable"


def test_script_with_a_name_in_invalid_utf8_is_refused(folder: Path) -> None:
    (folder / "\udcff.sh").write_text("")
    error = refused("./\udcff.sh")
    assert error.code == "file-unreadable"
    assert r"./\udcff.sh" in error.what


@pytest.mark.parametrize("target", ["", "a\0b", "x" * 5000, "\udcff.sh", "/dev/null"])
def test_job_target_of_odd_text_is_refused(folder: Path, target: str) -> None:
    assert refused(target).what


@given(
    st.text(max_size=20),
    st.text(max_size=20),
    st.text(max_size=20),
    st.lists(st.text(max_size=9), max_size=3),
)
def test_job_spec_of_any_text_is_a_job_or_usage_error(
    mem: str, time: str, other: str, args: list[str]
) -> None:
    try:
        job = job_spec(
            "train",
            {
                "mem": mem,
                "time": time,
                "name": other,
                "array": other,
                "constraint": other,
                "args": args,
            },
        )
    except UsageError as exc:
        failures = exc.failures
    else:
        assert job.mem
        return
    assert failures


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ({}, "job-or-script"),
        ({"bundled": "train", "script": Path("a.sh")}, "job-or-script"),
        ({"bundled": "tran"}, "unknown-job-type"),
    ],
)
def test_job_has_a_single_known_program(program: dict[str, Any], code: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec(name="a", **program)
    (error,) = caught.value.errors()
    assert error["ctx"]["error"].code == code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "bad-secret"),
        (b"\n", "bad-secret"),
        (b"canary\0x", "bad-secret"),
        (b"canary\nmore\n", "bad-secret"),
        (b"canary\xff", "bad-secret"),
        (b"canary" + b"x" * 65536, "bad-secret"),
        (None, "secret-without-value"),
    ],
)
def test_secret_is_refused_without_its_value(
    tmp_path: Path, content: bytes | None, code: str
) -> None:
    """Neither a value nor the word after =, which may be the value, is in the message."""
    file = tmp_path / "canary"
    if content is not None:
        file.write_bytes(content)
    error = refused(secret=[f"TOKEN={file}"])
    assert error.about == code
    assert "canary" not in f"{error} {error.fix}"


def test_secret_takes_variable_or_file_and_is_nowhere_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("canary-1\n")
    monkeypatch.setenv("HERE", "canary-2")
    job = job_spec("train", {"secret": [f"TOKEN={tmp_path}/file", "HERE"], "nodes": 2})
    values = {name: value.get_secret_value() for name, value in job.secret.items()}
    assert values == {"TOKEN": "canary-1", "HERE": "canary-2"}
    assert job.record["secret"] == ("TOKEN", "HERE")
    assert "canary" not in f"{job!r} {job.record} {job.model_dump_json()}"
    assert refused(secret=["NOT_SET_HERE"]).about == "secret-without-value"
    assert refused(secret=["SLURM_X=/x"]).about in {"secret-without-value", "variable-reserved"}
    assert refused(secret=["HERE"], env=["HERE=1"]).code == "options-exclusive"
