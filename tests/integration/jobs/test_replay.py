"""The job of a collected run is the same again, or one error says why it can't be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import Notice, UsageError
from clusterctl.jobs.bundled import reject_missing
from clusterctl.jobs.prepare import read_jobs
from clusterctl.jobs.replay import Replay, ReplayCode, ReplayRequest, replay_job, with_changes
from clusterctl.jobs.source import manifest, source_of
from clusterctl.jobs.submit import client_facts
from clusterctl.runs.collect import collect
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.sweep import are_pairs
from clusterctl.state.run_record import RunRecord
from clusterctl.transport.tree import hash_items
from tests.support.messages import condition, refused, shows
from tests.support.played.cluster import PlayedCluster, submit

AGAIN = ReplayRequest("0badcafe")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a script, which is the current one."""
    folder = tmp_path / "project"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "a.txt").write_text("first\n")
    (folder / "own.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --time=7\n#SBATCH --mem=1G\ncat conf/a.txt\n"
    )
    (folder / "plain.sh").write_text('#!/bin/bash\necho "$@"; cat conf/a.txt\n')
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "latest").symlink_to("conf/a.txt")
    monkeypatch.chdir(folder)
    return folder


Collected = Callable[..., tuple[Path, str]]
Really = Callable[..., RunRecord]


@pytest.fixture
def collected(session: Session, project: Path, tmp_path: Path) -> Collected:
    """What `replay` reads of a run, as `submit` records it; and the script as it was submitted."""

    def run(target: str, **flags: object) -> tuple[Path, str]:
        job = job_spec(target, flags)
        folder = tmp_path / "runs" / "demo-1-plain"
        folder.mkdir(parents=True)
        if source := source_of(Request.read(job)):
            (folder / "source.json").write_bytes(manifest(source.items, hash_items(source.files)))
            shutil.copytree(project, folder, dirs_exist_ok=True, ignore=lambda *_: [".git"])
        facts = client_facts(job, folder=project)
        (folder / "environment.json").write_text(json.dumps({"client": facts}))
        if job.sweep is not None:
            (folder / "sweep-tasks.json").write_text(json.dumps(job.sweep.record))
        return folder, session.site.render(Request.read(job))

    return run


@pytest.fixture
def really(session: Session, cluster: PlayedCluster, project: Path, tmp_path: Path) -> Really:
    """Submits, waits, and collects."""

    def run(job: JobSpec, **more: Any) -> RunRecord:
        done = submit(session, job, **more)
        cluster.wait_until_ended(done.job_id)
        (record,) = collect(session, [done.job_id], out=tmp_path / "runs")
        return record

    return run


def listed(replay: Replay) -> Any:
    assert replay.source is not None
    return json.loads(manifest(replay.source.items, hash_items(replay.source.files)))


def edit(run: Path, name: str, change: Callable[[Any], object]) -> None:
    document = json.loads((run / name).read_bytes())
    change(document)
    (run / name).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ("own.sh", {}),
        ("own.sh", {"nodes": 1, "gpus": 0, "tasks_per_node": 1}),
        ("plain.sh", {"array": "1-5:2%2", "args": ["--lr", "0.1", "two words", "$(id)"]}),
        (
            "plain.sh",
            {"sweep": ["lr=0.1,0.2", "flag=true,false"], "env": ["A=1 2"], "requeue": True},
        ),
        (
            "plain.sh",
            {"time": "90m", "mem": "3G", "signal": "USR2@99", "qos": "high", "outputs": ["x/**"]},
        ),
        ("plain.sh", {"container": "/images/a.sif", "folder": False}),
        ("train", {"nodes": 2, "launcher": "mpirun", "cpus": 2, "args": ["--epochs", "1"]}),
        ("train", {"sweep": ["lr=0.1,0.2"]}),
        ("plain.sh", {"sweep": ["a.lr=0.1,0.2"], "args": ["x=1"]}),
        ("plain.sh", {"sweep": ["lr=0.1,0.2"], "pack": True}),
    ],
)
def test_script_is_that_of_the_original(
    collected: Collected, session: Session, target: str, flags: dict[str, object]
) -> None:
    """Also where a script's own lines win over defaults, but not over flags."""
    run, script = collected(target, **flags)
    replay = replay_job(run, AGAIN)
    assert session.site.render(Request.read(replay.job)) == script


def test_drawn_values_of_a_sweep_are_those_of_the_original(
    collected: Collected, project: Path
) -> None:
    (project / "sweep.yaml").write_text("job: ./plain.sh\n")
    sweep = {
        "random": {"lr": "log 1e-5..1e-2", "n": "1..8"},
        "trials": 5,
        "list": [{"a": "1"}, {"a": "2"}],
    }
    run, _ = collected("plain.sh", sweep=sweep)
    replay = replay_job(run, AGAIN)
    assert replay.job.sweep is not None
    recorded = json.loads((run / "sweep-tasks.json").read_text())
    assert [dict(one) for one in replay.job.sweep.tasks] == recorded["tasks"]
    edit(run, "sweep-tasks.json", lambda found: found["tasks"][3].update(lr="0.5"))
    with refused("not-replayable", UsageError, "other sweep values"):
        replay_job(run, AGAIN)


def test_task_of_a_sweep_is_a_job_of_its_own(collected: Collected) -> None:
    run, _ = collected("plain.sh", sweep=["lr=0.1,0.2", "flag=true,false"], args=["--base", "7"])
    replay = replay_job(run, ReplayRequest("x", task="2", changes={"base": "8"}))
    assert (replay.job.array, replay.job.sweep) == (None, None)
    assert replay.job.args == ("--base", "8", "--lr", "0.2", "--flag")
    assert replay.job.env == {"SWEEP_LR": "0.2", "SWEEP_FLAG": "true"}
    with refused("option-invalid/task-key", UsageError):
        replay_job(run, ReplayRequest("x", changes={"lr": "1"}))


def test_task_of_a_sweep_of_pairs_keeps_its_form(collected: Collected) -> None:
    run, _ = collected("plain.sh", sweep=["++a.lr=0.1,0.2"], args=["x=7"])
    replay = replay_job(run, ReplayRequest("x", task="1", changes={"x": "8", "y": "9"}))
    assert replay.job.args == ("x=8", "++a.lr=0.2", "y=9")


@pytest.mark.parametrize("task", ["", "1"])
def test_change_has_the_form_of_the_sweep(collected: Collected, task: str) -> None:
    run, _ = collected("plain.sh", sweep=["+lr=1,2"])
    replay = replay_job(run, ReplayRequest("x", task=task, changes={"epochs": "2"}))
    assert replay.job.args[-1] == "epochs=2"


@pytest.mark.parametrize(
    ("swept", "key"), [("batch_size", "batch-size"), ("a-b", "a_b"), ("+lr", "lr")]
)
def test_replay_finds_keys_of_a_task_in_any_notation(
    collected: Collected, swept: str, key: str
) -> None:
    run, _ = collected("plain.sh", sweep=[f"{swept}=1,2"])
    with refused("option-invalid/task-key", UsageError):
        replay_job(run, ReplayRequest("x", changes={key: "7"}))


def test_dependencies_on_other_jobs_are_not_repeated(collected: Collected) -> None:
    run, script = collected("plain.sh", after=["3"], slurm=["--nice=5"])
    assert "--dependency=afterok:3" in script
    replay = replay_job(run, AGAIN)
    assert (replay.job.after, replay.job.slurm) == ((), ("--nice=5",))


@pytest.mark.parametrize(
    ("slurm", "flags", "expected"),
    [
        ("-C old --prefer='a b'", {"constraint": "new"}, ('"--prefer=a b"',)),
        ("--constraint=old -x n1", {"qos": "high"}, ("--constraint=old", "--exclude=n1")),
        ("--mem-per-cpu=1G -C singleton", {"mem": "2G", "constraint": "new"}, ()),
        ("--dependency=afterok:12 -x singleton", {}, ("--exclude=singleton",)),
        ("-d afterok:12,singleton", {}, ("--dependency=singleton",)),
        ("--dependency=singleton", {"mem": "2G"}, ("--dependency=singleton",)),
    ],
)
def test_options_of_sbatch_that_are_repeated(
    collected: Collected, slurm: str, flags: dict[str, str], expected: tuple[str, ...]
) -> None:
    run, _ = collected("plain.sh", slurm=[slurm])
    assert replay_job(run, ReplayRequest("x", flags=flags)).job.slurm == expected


def test_turn_among_jobs_with_the_same_name_is_repeated(collected: Collected) -> None:
    run, _ = collected("plain.sh", after=["3", "singleton"])
    assert replay_job(run, AGAIN).job.after == ("singleton",)


def test_task_of_another_array_keeps_its_number(collected: Collected) -> None:
    run, _ = collected("plain.sh", array="1-3")
    replay = replay_job(run, ReplayRequest("x", task="3"))
    assert replay.job.array == "3"


@pytest.mark.parametrize("tasks", [{"array": "1-3"}, {"sweep": ["lr=0..5"]}])
def test_task_of_a_packed_job_is_not_packed(collected: Collected, tasks: dict[str, object]) -> None:
    run, _ = collected("plain.sh", pack=True, **tasks)
    assert not replay_job(run, ReplayRequest("x", task="3")).job.pack
    assert replay_job(run, ReplayRequest("x", indices=[1, 3])).job.pack


def test_tasks_that_failed_keep_their_numbers_values_and_tags(collected: Collected) -> None:
    run, _ = collected(
        "train", sweep={"grid": {"lr": ["1", "2"], "seed": "0..2"}, "parallel": 2}, tag=["base"]
    )
    again = ReplayRequest("0badcafe", indices=[1, 3, 5, 4], flags={"note": "more room"})
    replay = replay_job(run, again)
    assert replay.job.array == "1,3-5%2"
    assert replay.job.sweep is not None
    assert (len(replay.job.sweep.tasks), replay.job.tag, replay.job.note) == (
        6,
        ("base",),
        "more room",
    )
    assert (replay.known["replay_of"], replay.known["of_failed"]) == ("0badcafe", True)
    replay = replay_job(run, AGAIN)
    assert (replay.job.array, replay.job.tag, "of_failed" in replay.known) == ("0-5%2", (), False)


def test_replay_uses_the_files_that_were_sent(collected: Collected, project: Path) -> None:
    run, _ = collected("plain.sh")
    sent = json.loads((run / "source.json").read_text())
    (project / "conf" / "a.txt").write_text("other\n")
    (project / "plain.sh").write_text("echo other\n")
    (project / "new.txt").write_text("new\n")
    (run / "tool").unlink()  # what is larger than a MiB is not collected
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    replay = replay_job(run, AGAIN)
    assert listed(replay) == sent
    assert replay.source is not None
    origins = {item.path: item.origin for item in replay.source.files}
    here = {one["path"]: run / one["path"] for one in sent["files"]}
    assert origins == here | {"tool": project / "tool"}
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (project / "tool").write_text("#!/bin/sh\nexit\n")
    (run / "conf" / "a.txt").write_text("the job changed it\n")
    with refused("not-replayable/files", UsageError, str(project)):
        replay_job(run, AGAIN)


def test_replay_sends_no_secret_of_a_run_unless_it_was_included(
    collected: Collected, project: Path
) -> None:
    """Nor does the replay of a run whose list of files has one although nobody named it."""
    (project / ".env").write_text("TOKEN=1\n")
    (project / ".env").chmod(0o600)
    run, _ = collected("plain.sh", include=["/.env"])
    replay = replay_job(run, AGAIN)
    assert replay.source is not None
    assert {item.path: item.mode for item in replay.source.files}[".env"] == 0o600
    assert replay.source.notes == ()
    edit(run, "environment.json", lambda facts: facts["client"]["job"].update(include=[]))
    replay = replay_job(run, AGAIN)
    assert replay.source is not None
    assert ".env" not in {item.path for item in replay.source.files}
    assert [condition(note) for note in replay.source.notes if isinstance(note, Notice)] == [
        "secrets-not-sent"
    ]


def test_replay_of_a_single_script_sends_only_it(collected: Collected) -> None:
    run, _ = collected("plain.sh", folder=False)
    replay = replay_job(run, ReplayRequest("x", code=ReplayCode.CURRENT))
    assert [row["path"] for row in listed(replay)["files"]] == ["plain.sh"]


def test_bundled_job_has_no_current_code(collected: Collected) -> None:
    run, _ = collected("train")
    (note,) = replay_job(run, ReplayRequest("x", code=ReplayCode.CURRENT)).notes
    assert shows(note, "code-of-bundled-job")
    assert replay_job(run, AGAIN).notes == ()


@pytest.mark.parametrize("target", ["-m pkg.train", "src/pkg/train.py"])
def test_project_is_replayed_from_its_run(really, session, project, monkeypatch, target):
    """The files, the module, and the folder in which the program starts are those of the run."""
    (project / "src" / "pkg").mkdir(parents=True)
    for name in ("__init__", "data"):
        (project / "src" / "pkg" / f"{name}.py").touch()
    (project / "src" / "pkg" / "train.py").write_text("import pkg.data, os\nprint(os.getcwd())\n")
    (project / "pyproject.toml").touch()
    subprocess.run(["git", "init", "-q", project], check=True)
    monkeypatch.chdir(project / "conf")
    (job,) = read_jobs(target if target.startswith("-m") else f"../{target}", {})
    assert (job.place.folder, job.place.start) == (project, "conf")
    script = session.site.render(Request.read(job))
    run = really(job).directory
    monkeypatch.chdir(project.parent)
    for moved in (False, True):
        if moved:
            project.rename(project.with_name("moved"))
        again = replay_job(run, AGAIN)
        assert listed(again) == json.loads((run / "source.json").read_text())
        assert session.site.render(Request.read(again.job)) == script


def test_damaged_project_is_not_replayed(really, project):
    run = really(job_spec("plain.sh", {})).directory
    record = json.loads((run / "environment.json").read_text())
    for damage in ({"start": "../x"}, {"roots": ["/"]}, {"script": "../plain.sh"}, {"roots": 3}):
        record["client"]["job"]["project"] = {"script": "plain.sh", **damage}
        (run / "environment.json").write_text(json.dumps(record))
        with refused("not-replayable", UsageError):
            replay_job(run, AGAIN)


def git(folder: Path, *words: str) -> None:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, env=env)


def test_replay_records_what_the_original_did(really: Really, project: Path) -> None:
    git(project, "init")
    git(project, "commit", "--allow-empty", "-m", "first")
    run = really(job_spec("plain.sh", {"args": ["x"]})).directory
    (project / "plain.sh").unlink()
    replay = replay_job(run, AGAIN)
    record = really(replay.job, source=replay.source, extra_facts=replay.known)
    assert (record.replay_of, record.of_failed) == ("0badcafe", False)
    facts = [
        json.loads((one / "environment.json").read_text())["client"]
        for one in (run, record.directory)
    ]
    assert facts[1].pop("replay_of") == "0badcafe"
    assert facts[0] == facts[1]
    assert facts[0]["git"]["root"] == str(project)
    assert (record.directory / "stdout.log").read_text() == "x\nfirst\n"


def test_replay_sends_the_image_if_unchanged(
    really: Really, project: Path, session: Session
) -> None:
    image = project.parent / "a.sif"
    image.write_bytes(b"image")
    run = really(job_spec("plain.sh", {"container": str(image)})).directory
    replay = replay_job(run, AGAIN)
    assert (replay.job.container, replay.notes) == (str(image), ())
    image.write_bytes(b"other")
    replay = replay_job(run, AGAIN)
    assert "store" in str(replay.job.container)
    assert shows(replay.notes[0], "image-of-the-cluster")
    reject_missing(session, replay.job)
    shutil.rmtree(Path(str(replay.job.container)).parent)
    with refused("not-found/file-on-cluster", UsageError):
        reject_missing(session, replay.job)


def test_replay_sends_the_same_model(really: Really, session: Session, project: Path) -> None:
    (project / "model").mkdir()
    (project / "model" / "model.json").write_text("{}")
    sent = source_of(Request.read(JobSpec(name="x", script=project / "plain.sh")))
    record = really(job_spec("eval", {"args": ["--model-folder", "model"]}), source=sent)
    (record.directory / "model" / "model.json").unlink()
    replay = replay_job(record.directory, AGAIN)
    assert replay.job.bundled == "eval"
    assert replay.source is not None
    assert {"model/model.json", "conf/a.txt"} <= {item.path for item in replay.source.files}
    lost = job_spec("eval", {"args": ["--model-folder", "/nowhere/model"]})
    with refused("not-found/file-on-cluster", UsageError, "--run RUN"):
        reject_missing(session, lost)


@pytest.mark.parametrize(
    ("args", "changes", "expected"),
    [
        ("--lr 0.1 x", {"lr": "1"}, "--lr 1 x"),
        ("--lr=0.1 --lr 0.2", {"lr": "1"}, "--lr=1"),
        ("--batch-size 8", {"batch_size": "4"}, "--batch-size 4"),
        ("--amp --lr 0.1", {"amp": "false", "lr": "-1"}, "--lr -1"),
        ("--lr 0.1", {"amp": "true"}, "--lr 0.1 --amp"),
        ("-n 3 lr=0.1 lr", {"lr": "1", "n": "4"}, "-n 4 lr=1 lr"),
        ("a -- --lr 1", {"lr": "2"}, "a --lr 2 -- --lr 1"),
        ("--lr -3 --x", {"lr": "--y"}, "--lr=--y --x"),
        ("", {"note": "a b"}, "--note a\0b"),
        ("++db/type=a x=1", {"db/type": "b", "y": "true"}, "++db/type=b x=1 y=true"),
    ],
)
def test_replay_changes_options_in_place(
    args: str, changes: Mapping[str, str], expected: str
) -> None:
    found = with_changes(args.split(), changes, pairs=are_pairs(args.split()))
    assert found == [word.replace("\0", " ") for word in expected.split(" ")]


def file(**fields: object) -> Callable[[Any], object]:
    """Another file in the list of those that were sent."""
    return lambda d: d["files"].append({"path": "x", "sha256": "0" * 64, "size": 1, **fields})


def edit_of(**fields: object) -> Callable[[Any], object]:
    """Other things that the job asked for."""
    return lambda d: d["client"]["job"].update(fields)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        *(
            ("source.json", file(path=path), "is damaged")
            for path in ("../x", "/etc/passwd", "a\0b", "\ud800", ["x"], "x" * 10**6)
        ),
        ("source.json", file(path="latest/x"), "the same name"),
        ("source.json", lambda d: d["files"].append(d["files"][0]), "the same name"),
        ("source.json", lambda d: d["folders"].append("plain.sh"), "the same name"),
        ("source.json", file(size=1 << 60), "than a job may"),
        ("source.json", file(size="1"), "sha256 of x"),
        ("source.json", lambda d: d["links"].append({"path": "y", "target": "a\0"}), "of a link"),
        ("source.json", lambda d: d.update(files=7), "the script plain.sh"),
        ("environment.json", lambda d: d.update(client=None), "another machine"),
        ("environment.json", lambda d: d["client"].pop("given"), "options of the submission"),
        ("environment.json", edit_of(nodes="many"), "--nodes"),
        ("environment.json", edit_of(script=None, bundled="./plain.sh"), "neither a script"),
        ("environment.json", edit_of(array="; rm -rf"), "--array"),
        ("environment.json", edit_of(sweep=[1], script="/a\0/b"), "the script b"),
    ],
)
def test_damaged_or_hostile_run_is_refused(
    collected: Collected, name: str, change: Callable[[Any], object], why: str
) -> None:
    run, _ = collected("plain.sh", nodes=2)
    edit(run, name, change)
    with refused("not-replayable", UsageError, why):
        replay_job(run, AGAIN)


@pytest.mark.parametrize("what", ["link", "pipe", "none", "half", "deep"])
def test_replay_with_a_source_list_that_is_not_a_file_is_refused(
    collected: Collected, tmp_path: Path, what: str
) -> None:
    run, _ = collected("plain.sh")
    path = run / "source.json"
    text = path.read_text()
    path.unlink()
    if what == "link":
        (tmp_path / "elsewhere.json").write_text(text)
        path.symlink_to(tmp_path / "elsewhere.json")
    elif what == "pipe":
        os.mkfifo(path)
    elif what in {"half", "deep"}:
        path.write_text(text[:-20] if what == "half" else "[" * 100_000)
    with refused("not-replayable", UsageError, "source.json can't"):
        replay_job(run, AGAIN)


def test_replay_does_not_follow_links_out_of_the_run(collected: Collected, project: Path) -> None:
    run, _ = collected("plain.sh")
    for folder in (run, project):
        (folder / "conf").rename(folder.parent / f"conf-of-{folder.name}")
    (run / "conf").symlink_to(project.parent / "conf-of-project")
    with refused("not-replayable/files", UsageError, "conf/a.txt"):
        replay_job(run, AGAIN)


def test_replay_without_the_value_of_a_secret_names_the_variable(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    run, _ = collected("plain.sh", secret=["TOKEN"])
    monkeypatch.delenv("TOKEN")
    with refused("secret-without-value", UsageError, "TOKEN"):
        replay_job(run, AGAIN)


def test_replay_reads_no_variables_of_this_machine(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    run, _ = collected("plain.sh", env=["A=1"])
    edit(run, "environment.json", lambda found: found["client"]["job"]["env"].update(TOKEN=None))
    replay = replay_job(run, AGAIN)
    assert replay.job.env == {"A": "1"}
