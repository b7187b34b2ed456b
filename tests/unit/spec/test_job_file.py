"""Job files: what they say, in what order it wins, and where what is wrong stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from pydantic import SecretStr
from ruamel.yaml import YAML

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_file import job_schema, jobs_of_file
from clusterctl.spec.job_options import OPTIONS, JobOptions
from clusterctl.spec.load import read_spec
from tests.support.messages import refused

EVERYTHING = """\
job: train.py
name: mine
args: [--lr, 1e-3, --on, true]
nodes: 2
tasks_per_node: 4
ranks: 2
cpus: 2
gpus: 1
mem: 4096
time: 1h30m
partition: train
account: physics
qos: urgent
constraint: a100&ib
reservation: maintenance
licenses: "matlab:2,ansys@server:1"
array: "0-3"
pack: true
after: [12, 13_1:any, singleton]
from_run: "11"
slurm: [--exclude=demo-train-1, --nice=10]
signal: USR1@120
requeue: true
chain: 7d
launcher: mpirun
hang: end@300
alarm: [idle=end@1h, data=off]
folder: false
include: [data/*.bin]
exclude: ["*.log"]
outputs: ["results/**", "*.pt"]
stage: [/shared/x:/scratch/x, "~/y:$TMPDIR/y", "/z-{00..31}.tar:/scratch/z:by-node"]
env: {LR: 1e-3, DEBUG: true, NOTE: "a b"}
secret: {HF_TOKEN: token}
module: [gcc/12, mpi]
build: make -j4
container: images/x.sif
mount: ["/shared/x:/x", "~/y:/y:ro"]
env_path: /shared/envs/torch
requirements: requirements.txt
tag: [base, "3"]
note: a first try
"""
SWEEP = """\
job: train.py
nodes: 2
env: {LR: 0.1, SEED: 1}
variants:
  small: {nodes: 1, env: {LR: 0.5}}
  big: {nodes: 8, name: huge, args: [--deep]}
  bundled: {job: train}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder than the current one, with a script and an image."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "train.py").touch()
    (tmp_path / "token").write_text("canary\n")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.sif").touch()
    return tmp_path


Read = Callable[..., tuple[JobSpec, ...]]


@pytest.fixture
def read(folder: Path) -> Read:
    """`read(text, flags, variants)`: the jobs of a file of this text."""

    def jobs(
        text: str, flags: dict | None = None, variants: tuple[str, ...] = ()
    ) -> tuple[JobSpec, ...]:
        path = folder / "job.yaml"
        path.write_text(text)
        return jobs_of_file(path, flags or {}, variants)

    return jobs


def problems(read: Read, text: str) -> list[str]:
    """Return of each problem its place, its key, its code, and the name that is probably meant."""
    with refused("spec-invalid", SpecError, where="") as caught:
        read(text)
    return [
        f"{p.line}:{p.column} {p.key}: {p.code} {p.hint.partition('did you mean ')[2]}".rstrip(" ?")
        for p in caught.value.problems
    ]


def test_job_file_has_a_key_for_each_flag(read: Read, folder: Path) -> None:
    (job,) = read(EVERYTHING)
    content = YAML(typ="safe").load(EVERYTHING)
    texts = {
        "args": ("--lr", "1e-3", "--on", "true"),
        "after": ("12", "13_1:any", "singleton"),
        "alarm": ("idle=end@1h", "data=off"),
        "stage": ("/shared/x:/scratch/x", "~/y:$TMPDIR/y", "/z-{00..31}.tar:/scratch/z:by-node"),
        "mem": "4GiB",
        "time": "1:30:00",
        "env": {"LR": "1e-3", "DEBUG": "true", "NOTE": "a b"},
        "secret": {"HF_TOKEN": SecretStr("canary")},
        "env_path": "/shared/envs/torch",
        "container": str(folder / "images" / "x.sif"),
        "mount": ("/shared/x:/x", "~/y:/y:ro"),
        "requirements": folder / "requirements.txt",
    }
    assert job.places.keys() == {*content, "bundled", "script"} - {"job"}
    expected = JobSpec(script=folder / content.pop("job"), **content | texts, places=job.places)
    assert job == expected
    assert job.model_fields_set == {*content, "bundled", "script", "places"}
    assert {*content, "sweep", "scaling"} == set(JobOptions.model_fields)
    assert job.tasks == 8


def test_sweep_is_array_and_keeps_values_as_written(read: Read) -> None:
    (job,) = read(
        "job: train\n"
        "args: [--epochs, 3]\n"
        "sweep: {grid: {lr: [1e-4, .10], seed: 0..1}, parallel: 2}\n"
    )
    assert (job.array, job.args) == ("0-3%2", ("--epochs", "3"))
    assert job.sweep is not None
    assert [*map(dict, job.sweep.tasks)] == [
        {"lr": lr, "seed": seed} for lr in ("1e-4", ".10") for seed in ("0", "1")
    ]
    with refused("sweep-with-array", SpecError):
        read("job: train\narray: 0-3\nsweep: {grid: {lr: [1, 2]}}\n")


@pytest.mark.parametrize(
    ("sweep", "code", "key"),
    [
        ("{}", "sweep-empty", "sweep"),
        ("{grid: {lr: []}}", "list-empty", "sweep.grid.lr"),
        ("{grid: {l r: [1]}}", "not-an-option-name", "sweep.grid.l r"),
        ("{gird: {lr: [1]}}", "unknown-key", "sweep.gird"),
        ("{grid: {lr: [1]}, metric: [1]}", "wrong-type", "sweep.metric"),
        ("[1]", "sweep-entry", "sweep"),
    ],
)
def test_wrong_sweep_is_refused_at_its_key(read: Read, sweep: str, code: str, key: str) -> None:
    with refused(code, SpecError) as caught:
        read(f"job: train\nsweep: {sweep}\n")
    assert (code, key) in {(problem.code, problem.key) for problem in caught.value.problems}


def test_tags_of_file_variant_and_flags_are_joined(read: Read) -> None:
    (job,) = read("tag: [a]\nvariants: {x: {job: train, tag: [b, a]}}\n", {"tag": ["c"]})
    assert job.tag == ("a", "b", "c")


def test_variants_named_are_chosen_otherwise_all(read: Read) -> None:
    small, big, bundled = read(SWEEP)
    assert (small.name, small.nodes, small.env) == ("train-small", 1, {"LR": "0.5", "SEED": "1"})
    assert (big.name, big.nodes, big.args) == ("huge", 8, ("--deep",))
    assert (bundled.name, bundled.bundled, bundled.nodes) == ("train-bundled", "train", 2)
    assert [job.name for job in read(SWEEP, variants=("big", "small", "big"))] == [
        "huge",
        "train-small",
    ]


def test_flags_win_over_the_variant_and_that_over_the_file(read: Read) -> None:
    flags = {"nodes": 5, "env": ["SEED=2", "X="], "name": "n", "args": ["y"]}
    small, big, _ = read(SWEEP, flags)
    assert {job.nodes for job in (small, big)} == {5}
    assert small.env == {"LR": "0.5", "SEED": "2", "X": ""}
    assert big.args == ("y",)
    assert (small.name, big.name) == ("n-small", "n-big")
    assert read(SWEEP, flags, ("big",))[0].name == "n"


LISTS = """\
job: train.py
args: [--epochs, 20]
include: [data/]
exclude: ["*.log"]
outputs: ["*.pt"]
variants:
  plain: {}
  more: {args+: [--lr, 1e-3], include+: [b], exclude+: [c], outputs+: [d]}
"""


def test_variant_appends_to_lists_of_the_file(read: Read) -> None:
    plain, more = read(LISTS)
    assert (plain.args, plain.outputs) == (("--epochs", "20"), ("*.pt",))
    assert more.args == ("--epochs", "20", "--lr", "1e-3")
    assert (more.include, more.exclude, more.outputs) == (
        ("data/", "b"),
        ("*.log", "c"),
        ("*.pt", "d"),
    )
    assert read("job: train.py\nvariants: {a: {args+: [x]}}\n")[0].args == ("x",)
    assert [job.args for job in read(LISTS, {"args": ["y"]})] == [("y",), ("y",)]


@pytest.mark.parametrize("key", ["args", "include", "exclude", "outputs"])
def test_variant_that_would_replace_a_list_is_refused(read: Read, key: str) -> None:
    text = f"job: train\n{key}: [a]\nvariants:\n  v: {{nodes: 1, {key}: [b]}}\n"
    assert problems(read, text) == [f"4:17 variants.v.{key}: list-would-replace"]
    text = f"job: train\nvariants:\n  v: {{{key}: [b], {key}+: [c]}}\n"
    with refused("list-twice"):
        read(text)
    assert getattr(read(f"job: train\nvariants: {{v: {{{key}: [b]}}}}\n")[0], key) == ("b",)


def test_list_is_appended_in_variants_only(read: Read) -> None:
    assert problems(read, "job: train\nargs+: [a]\n") == ["2:1 args+: unknown-key args"]
    found = problems(read, "job: train\nvariants: {v: {arg+: [a]}}\n")
    assert found == ["2:16 variants.v.arg+: unknown-key args+"]


def test_long_name_leaves_room_for_the_variants(read: Read) -> None:
    (job,) = read(f"job: train\nname: {'x' * 64}\nvariants: {{v1: {{}}}}\n")
    assert job.name == "x" * 61 + "-v1"


def test_name_null_is_the_name_of_the_program(read: Read) -> None:
    assert read("job: train.py\nname:\n")[0].name == "train"
    assert read("job: train\nname: ~\nvariants: {a: {}, b: {name: null}}\n")[1].name == "train-b"


def test_unknown_variant_is_refused_with_the_known_ones(read: Read) -> None:
    with refused("not-found/variant", UsageError, fix="did you mean big?"):
        read(SWEEP, variants=("bgi",))
    with refused("not-found/variant", UsageError) as caught:
        read(SWEEP, variants=("zzz",))
    assert "small, big, bundled" in caught.value.fix


def test_env_without_value_takes_it_from_the_environment(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "x y")
    assert read("job: train\nenv: {TOKEN: , A: }\n".replace(", A: ", ""))[0].env == {"TOKEN": "x y"}
    assert read("job: train\nenv: [TOKEN, A=1=2]\n")[0].env == {"TOKEN": "x y", "A": "1=2"}
    assert problems(read, "job: train\nenv: {NOT_SET_HERE: }\n") == [
        "2:6 env: variable-without-value"
    ]


def test_problems_are_listed_together_with_their_places(read: Read) -> None:
    text = """\
nodes: two
gpus: true
tiem: 5
mem: true
launcher: mpi
env: {2x: 1, SLURM_X: 2}
container: library://x
account: 5
variants:
  "a b": {}
  x: {noodles: 3, job: train}
  env: {env: {PATH: /bin}, job: train}
  y: 3
"""
    assert problems(read, text) == [
        "1:8 nodes: wrong-type",
        "2:7 gpus: wrong-type",
        "3:1 tiem: unknown-key time",
        "4:6 mem: not-a-memory-size",
        "5:11 launcher: unknown-value",
        "6:7 env.2x: not-a-variable-name",
        "6:14 env.SLURM_X: variable-reserved",
        "7:12 container: not-an-image",
        "8:10 account: wrong-type",
        "10:3 variants.a b: bad-format",
        "10:3 variants.a b: job-missing",
        "11:7 variants.x.noodles: unknown-key nodes",
        "12:15 variants.env.env.PATH: variable-reserved",
        "13:6 variants.y: wrong-type",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1:1 spec: file-empty"),
        ("- a\n", "1:1 spec: not-a-mapping"),
        ("nodes: 2\n", "1:1 job: job-missing"),
        ("jb: train\n", "1:1 jb: unknown-key job"),
        ("job: 5\n", "1:6 job: wrong-type"),
        ("job: trian\n", "1:6 job: bundled-job train"),
        ("job: ./tarin.py\n", "1:6 job: bundled-job train.py"),
        ("job: train\nvariants:\n  a: {job: images}\n", "3:12 variants.a.job: file-unreadable"),
        ('job: train\nrequeue: "yes"\n', "2:10 requeue: wrong-type"),
        ("job: train\nvariants:\n  a: {folder: 0}\n", "3:15 variants.a.folder: wrong-type"),
        ("job: [train\n", "2:1 yaml: bad-yaml"),
        ("? [a]\n: 1\njob: train\n", "1:1 ('a',): wrong-type"),
        ("? [[a]]\n: 1\njob: train\n", "1:1 yaml: bad-yaml"),
    ],
)
def test_job_file_problem_is_reported_at_its_line(read: Read, text: str, problem: str) -> None:
    assert problems(read, text) == [problem]


@pytest.mark.parametrize(
    "pattern", ["", " ", "/", "//", "!", "!/", "../../etc/*", "./x", "a/../b", ".", "#x"]
)
@pytest.mark.parametrize("key", ["outputs", "include", "exclude"])
def test_pattern_that_never_matches_is_refused(read: Read, key: str, pattern: str) -> None:
    text = f"job: train\n{key}: ['*.pt', '{pattern}']\n"
    with refused("pattern-matches-nothing", SpecError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.key) == (2, len(key) + 12, f"{key}[1]")
    with refused("pattern-matches-nothing", UsageError) as caught:
        read("job: train\n", {key: [pattern]})
    assert OPTIONS[key].flag.removesuffix("=") in caught.value.what


def test_cluster_spec_as_job_file_is_refused(read: Read) -> None:
    with refused("file-invalid/job-file", UsageError) as caught:
        read("version: 1\nname: demo\npartitions:\n  - {name: train, nodes: 2}\n")
    assert "up" in caught.value.fix


def test_missing_file_is_refused(folder: Path) -> None:
    with refused("not-found/file", UsageError):
        jobs_of_file(folder / "none.yaml", {})


def test_job_schema_accepts_job_files_and_rejects_mistakes(
    golden: Callable[[str, str], None],
) -> None:
    schema = job_schema()
    golden("job-schema.json", json.dumps(schema, indent=2) + "\n")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in (EVERYTHING, SWEEP):
        assert list(validator.iter_errors(YAML(typ="safe").load(text))) == []
    for text in ("jb: train", "env: {2x: 1}", "variants: {a: {noodles: 1}}", "nodes: 0"):
        assert list(validator.iter_errors(YAML(typ="safe").load(text)))


def test_job_file_schema_describes_every_key() -> None:
    schema = job_schema()
    keys = {**schema["properties"], **schema["$defs"]["Variant"]["properties"]}
    assert {*JobOptions.model_fields, "args+"} < keys.keys()
    assert [name for name, key in keys.items() if not key.get("description")] == []


SKYPILOT = (
    "name: tune\n"
    "resources: {accelerators: A100:8}\n"
    "num_nodes: 2\n"
    "setup: pip install x\n"
    "run: torchrun t.py\n"
)
DSTACK = (
    "type: task\n"
    "name: train\n"
    "nodes: 2\n"
    "python: '3.12'\n"
    "env: [EPOCHS=3]\n"
    "commands: [torchrun t.py]\n"
)
KUBERNETES = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: train}\nspec: {}\n"
CONDA = "name: train\nchannels: [conda-forge]\ndependencies: [python=3.12, numpy]\n"


@pytest.mark.parametrize(
    ("text", "tool"),
    [(SKYPILOT, "SkyPilot"), (DSTACK, "dstack"), (KUBERNETES, "Kubernetes"), (CONDA, "conda")],
)
def test_file_of_another_tool_is_named(folder: Path, text: str, tool: str) -> None:
    path = folder / "task.yaml"
    path.write_text(text)
    with refused("file-invalid/other-tool", UsageError, tool):
        jobs_of_file(path, {})
    with refused("file-invalid/other-tool", UsageError, tool):
        read_spec(path)


def test_unknown_key_lists_known_keys_once(folder: Path) -> None:
    path = folder / "task.yaml"
    path.write_text("job: train.py\nresources: 1\ncommands: 2\nwhatever: 3\nnoodes: 2\n")
    with pytest.raises(SpecError) as error:
        jobs_of_file(path, {})
    assert [problem.code for problem in error.value.problems] == ["unknown-key"] * 4
    assert str(error.value).count("tasks_per_node") == 1
    assert len(error.value.problems[-1].hint) < 30
