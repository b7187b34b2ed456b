"""Words that are not clusterctl's: each is one error with exit code 2, and the fix names what to
type.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from clusterctl.cli.main import LazyVerb, app
from clusterctl.cli.refusals import HABITS
from clusterctl.cli.verbs import VERBS
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from tests.support.messages import codes, condition
from tests.support.verbs import Clusterctl

BAD = "option-invalid/command-line"
WORDS = "option-invalid/program-arguments"
# What is typed after `clusterctl`: the code of the error, and words of its cause and of its fix.
SLIPS = {
    "statsu": (BAD, "'status'", "`clusterctl --help`"),
    "up --yse": (BAD, "--yes", "`clusterctl up --help`"),
    "node remov demo-1": (BAD, "'remove'", "`clusterctl node --help`"),
    "frobnicate": (BAD, "'frobnicate'", "`clusterctl --help`"),
    "squeue": (BAD, "'squeue'", "`clusterctl jobs`"),
    "create --name demo": (BAD, "'create'", "`clusterctl up`"),
    "-f demo.yaml rm --yes": (BAD, "'rm'", "`clusterctl down`"),
    "log 12": (BAD, "'log'", "`clusterctl logs`"),
    "scp a b": (BAD, "'scp'", "`clusterctl put` or `clusterctl get`"),
    "Up": (BAD, "'Up'", "`clusterctl up`"),
    "init local": (BAD, "(local)", "`clusterctl init --provider local`"),
    "down other": (BAD, "(other)", "`clusterctl down --cluster other`"),
    "down nothing": (BAD, "(nothing)", "`clusterctl down --help`"),
    "jobs another": ("not-found/run", "'another'", "CLUSTER/12"),
    "cancel 12_": ("not-found/run", "'12_'", "12_[1-3]"),
    "cancel _3": ("not-found/run", "'_3'", "12_3"),
    "logs latest": ("not-found/run", "'latest'", "CLUSTER/12"),
    "wait": (BAD, "ID", "`clusterctl wait --help`"),
    "tail 'a b'": (BAD, "'tail'", "`clusterctl logs -f`"),
    "drain demo-1": (BAD, "'drain'", "`clusterctl node drain`"),
    "runs compare 1 2": (BAD, "'compare'", "`clusterctl runs diff`"),
    "jobs --follow": (BAD, "--follow", "`clusterctl top`"),
    "submit train -n4": (BAD, "-n", "--nodes NODES --tasks-per-node TASKS`"),
    "submit train --node 2": (BAD, "--nodes", "`clusterctl submit JOB -- --node`"),
    "submit train --nodes2 4": (BAD, "--nodes2", "did you mean --nodes?"),
    "submit train --partion a": (BAD, "--partion", "did you mean --partition?"),
    "jobz": (BAD, "'jobs'", "lists the commands"),
    "jobs --al": (BAD, "--al", "did you mean --all?"),
    "submit train --epochs 3": (BAD, "--epochs", "`clusterctl submit JOB -- --epochs`"),
    "submit my.sh --dependency 5": (BAD, "--dependency", "submit JOB --after JOB_ID`"),
    "submit x.py --nodelist a-train-2": (BAD, "sbatch", " --slurm --nodelist=a-train-2`"),
    "submit x.py -x demo-train-2": (BAD, "-x", " --slurm --exclude=demo-train-2`"),
    "submit x.py -wa-1": (BAD, "-w", " --slurm --nodelist=a-1`"),
    "submit x.py --folder none --exclusive --follow": (BAD, "sbatch", " --slurm --exclusive`"),
    "submit x.py --gres=gpu:2 --wait": (BAD, "--gres", "`clusterctl submit JOB --gpus "),
    "submit x.py --gres tmpfs:2": (BAD, "--gres", " --slurm --gres=tmpfs:2`"),
    "submit x.py --gpus-per-task 1": (BAD, "sbatch", "`clusterctl submit JOB --gpus "),
    "submit x.py --hint --follow": (BAD, "--hint", " --slurm --hint=VALUE`"),
    "submit x.py --error F": (BAD, "--error", "leave it out"),
    "submit x.py --comment hi": (BAD, "--comment", "`clusterctl submit JOB --note "),
    "submit x.py --oversubscribe": (BAD, "sbatch", " --slurm --oversubscribe`"),
    "submit x.py --export ALL": (BAD, "sbatch", "`clusterctl submit JOB -- --export`"),
    "submit x.py input.txt": (WORDS, "input.txt", "submit JOB [OPTIONS] -- input.txt`"),
    "submit x.py --time 5 min -- b": (WORDS, "min", "submit JOB [OPTIONS] -- min`"),
    "submit torchrun x.py": (WORDS, "x.py", "submit SCRIPT --launcher torchrun -- "),
    "submit trian": ("not-found/bundled-job", "'trian'", "did you mean train?"),
    "submit ./xx.py": ("not-found/bundled-job", "'./xx.py'", "did you mean x.py?"),
    "submit y.py": ("not-found/bundled-job", "'y.py'", "name a bundled job"),
    "submit": (BAD, "JOB", "`clusterctl submit --help`"),
    "runs show": (BAD, "RUN", "`clusterctl runs show --help`"),
}  # fmt: skip


@pytest.fixture
def folder(cli: Clusterctl) -> Path:
    (cli.cwd / "x.py").touch()
    return cli.cwd


@pytest.fixture
def other(cli: Clusterctl) -> None:
    """The cluster `other` is up, and has had a job."""
    workspace = Workspace(cli.home / "other")
    workspace.create()
    workspace.inventory.write_text("{}")
    entry = JobEntry(token="7" * 8, name="another", user="ada", submitted_at=0.0, job_id="7")
    Ledger(workspace.jobs).add(entry)


@pytest.mark.parametrize("typed", SLIPS)
def test_slip_is_refused_with_the_near_name_or_the_habit(
    cli: Clusterctl, folder: Path, other: None, typed: str
) -> None:
    code, cause, fix = SLIPS[typed]
    result = cli("-o", "json", *shlex.split(typed), rc=2)
    (failure,) = result.json["failures"]
    assert condition(failure) == code
    assert cause in failure["cause"]
    assert failure["cause"].count("Did you mean") <= 1
    assert fix in failure["fix"]
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "near", "not_near"),
    [
        # The opposite of an option.
        ("submit x.py --no-wait", "", "--wait"),
        ("submit x.py --nofollow", "", "--follow"),
        ("up --no-yes", "", "--yes"),
        # An option that would take the next option as its value, or has no value.
        ("submit x.py --exclud --wait", "", "--exclude"),
        ("submit x.py --wai=3", "", "--wait"),
        ("submit x.py --partitio", "", "--partition"),
        ("submit x.py --exclud data/", "--exclude", "--include="),
        ("submit x.py --folow", "--follow", "--no-wait"),
        # An option that is near only by the dashes.
        ("up --nodes 4", "", "--yes"),
        ("jobs --user root", "", "--cluster"),
        ("submit x.py --image x", "", "--time"),
    ],
)
def test_near_name_keeps_the_meaning(
    cli: Clusterctl, folder: Path, typed: str, near: str, not_near: str
) -> None:
    (failure,) = cli("-o", "json", *typed.split(), rc=2).json["failures"]
    assert near in failure["cause"]
    assert not_near not in failure["cause"].partition("(")[2]


def options_of(verb: str) -> set[str]:
    return {name for param in LazyVerb(verb).load().params for name in param.opts}


@pytest.mark.parametrize("typed", HABITS)
def test_habit_table_names_foreign_commands_with_existing_answers(typed: str) -> None:
    """The table neither hides a verb or an option of ours, nor names one that does not exist."""
    first, *rest = typed.split()
    assert typed not in [*VERBS, *app.commands]
    assert first not in VERBS or not options_of(first) & set(rest)
    for line in HABITS[typed].split(" | "):
        words = line.split()
        (verb,) = {" ".join(words[:count]) for count in (1, 2)} & VERBS.keys()
        assert options_of(verb) >= {word for word in words if word.startswith("-") and word != "--"}


def test_flags_accept_slurms_names(cli: Clusterctl) -> None:
    flags = "--ntasks-per-node 2 -c 3 --gpus-per-node 0 -t 30 -J slow"
    script = cli("submit", "train", *flags.split(), "--dry-run").stdout
    for line in ("--ntasks-per-node=2", "--cpus-per-task=3", "--time=00:30:00", "--job-name=slow"):
        assert f"#SBATCH {line}" in script, script
    assert "--job-name" not in cli("submit", "--help").stdout


def test_words_after_two_dashes_are_arguments_of_the_program(cli: Clusterctl, folder: Path) -> None:
    script = cli("submit", "x.py", "--dry-run", "--", "min", "--nodes", "3", "--help").stdout
    assert script.rpartition("x.py ")[2].split()[:4] == ["min", "--nodes", "3", "--help"]
    assert " gemm --sizes 64" in cli("submit", "--dry-run", "--", "gemm", "--sizes", "64").stdout


def test_arguments_of_bundled_jobs_are_checked_before_submission(cli: Clusterctl) -> None:
    """The payload's own test has the other errors."""
    for flags, words, part in (
        ((), ("--lrr", "0.1"), "mean --lr?"),
        (("--dry-run",), ("--lr", "abc"), "argument --lr: 'abc'"),
        (
            ("--array", "0-3"),
            ("--iterations", "2", "--warmup-iterations", "3"),
            "after 2 iterations",
        ),
        (("--nodes", "2", "--tasks-per-node", "2"), ("--pp", "3"), "the 4 ranks"),
    ):
        result = cli("-o", "json", "submit", "train", *flags, "--", *words, rc=2)
        (failure,) = result.json["failures"]
        assert condition(failure) == "option-invalid/program"
        assert failure["cause"].startswith("train: ")
        assert part in failure["cause"]
        assert "train -- --help`" in failure["fix"]
        # No cluster is looked for before that.
        assert result.stderr.startswith("error: ")


def test_arguments_are_checked_against_the_default_ranks(cli: Clusterctl) -> None:
    result = cli("-o", "json", "submit", "train", "--dry-run", "--", "--zero", "1", rc=2)
    (failure,) = result.json["failures"]
    assert condition(failure) == "option-invalid/program"
    assert all(part in failure["cause"] for part in ("--zero", "two or more"))


def test_arguments_in_a_job_file_are_checked_before_submission(cli: Clusterctl) -> None:
    (cli.cwd / "job.yaml").write_text(
        "job: train\nvariants: {a: {args: [--lr, 1e-2]}, b: {args: [--lrr, 1e-2]}}\n"
    )
    result = cli("-o", "json", "submit", "job.yaml", rc=2)
    assert codes(result) == ["option-invalid/program"]
    assert all(
        part in result.stderr for part in ("train: ", "--lrr 1e-2", "mean --lr?", "(train-b)")
    )


def test_error_of_a_sweep_names_the_values(cli: Clusterctl) -> None:
    result = cli(
        "-o", "json", "submit", "train", "--sweep", "model=mlp,gpt-tiny", "--dry-run", rc=2
    )
    (failure,) = result.json["failures"]
    assert condition(failure) == "option-invalid/program"
    assert "(--model gpt-tiny)" in result.stderr


def test_words_after_two_dashes_replace_args_of_a_job_file(cli: Clusterctl) -> None:
    (cli.cwd / "job.yaml").write_text(
        "job: train\nargs: [--epochs, 2]\nvariants: {a: {}, b: {args+: [--lr, 1]}}\n"
    )
    result = cli("submit", "job.yaml", "--dry-run", "--", "--seed", "3")
    assert result.stdout.count(" train --seed 3") == 2


def test_config_file_on_the_cluster_is_not_checked_locally(cli: Clusterctl) -> None:
    script = cli(
        "submit", "train", "--dry-run", "--", "--config", "/shared/x.toml", "--lr", "0.1"
    ).stdout
    assert "--config /shared/x.toml" in script
    wrong = ("train", "--dry-run", "--", "--config", "/shared/x.toml", "--lr", "x")
    assert "argument --lr" in cli("submit", *wrong, rc=2).stderr


def test_help_of_a_bundled_job(cli: Clusterctl) -> None:
    output = cli("submit", "train", "--nodes", "2", "--", "--help")
    assert output.stdout.split()[1:5] == ["clusterctl", "submit", "train", "--"]
    assert "--global-batch-size N" in output.stdout
    assert output.stderr == ""
    assert "--run RUN" in cli("-o", "json", "submit", "predict", "--", "-h").json["help"]


@pytest.mark.parametrize("job", ["eval", "sample", "predict", "export"])
def test_job_without_its_model_is_refused(cli: Clusterctl, job: str) -> None:
    result = cli("-o", "json", "submit", job, rc=2)
    assert codes(result) == ["option-invalid/trained-model"]
    assert f" {job} --run RUN\n" in result.stderr
    assert ("or a checkpoint" in result.stderr) == (job in {"eval", "export"})
