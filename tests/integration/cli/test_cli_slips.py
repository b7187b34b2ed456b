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
from tests.support.messages import codes
from tests.support.verbs import Clusterctl

# What is typed after `clusterctl`: the code of the error, and words of its cause and of its fix.
SLIPS = {
    "statsu": ("bad-command-line", "'status'", "`clusterctl --help`"),
    "up --yse": ("bad-command-line", "--yes", "`clusterctl up --help`"),
    "node remov demo-1": ("bad-command-line", "'remove'", "`clusterctl node --help`"),
    "frobnicate": ("bad-command-line", "'frobnicate'", "`clusterctl --help`"),
    "squeue": ("bad-command-line", "'squeue'", "`clusterctl jobs`"),
    "create --name demo": ("bad-command-line", "'create'", "`clusterctl up`"),
    "-f demo.yaml rm --yes": ("bad-command-line", "'rm'", "`clusterctl down`"),
    "log 12": ("bad-command-line", "'log'", "`clusterctl logs`"),
    "scp a b": ("bad-command-line", "'scp'", "`clusterctl put` or `clusterctl get`"),
    "Up": ("bad-command-line", "'Up'", "`clusterctl up`"),
    "init local": ("bad-command-line", "(local)", "`clusterctl init --provider local`"),
    "down other": ("bad-command-line", "(other)", "`clusterctl down --cluster other`"),
    "down nothing": ("bad-command-line", "(nothing)", "`clusterctl down --help`"),
    "jobs another": ("unknown-run", "'another'", "CLUSTER/12"),
    "cancel 12_": ("unknown-run", "'12_'", "12_[1-3]"),
    "cancel _3": ("unknown-run", "'_3'", "12_3"),
    "logs latest": ("unknown-run", "'latest'", "CLUSTER/12"),
    "logs": ("bad-command-line", "ID", "`clusterctl logs --help`"),
    "tail 'a b'": ("bad-command-line", "'tail'", "`clusterctl logs -f`"),
    "drain demo-1": ("bad-command-line", "'drain'", "`clusterctl node drain`"),
    "runs compare 1 2": ("bad-command-line", "'compare'", "`clusterctl runs diff`"),
    "jobs --follow": ("bad-command-line", "--follow", "`clusterctl top`"),
    "submit train -n4": ("bad-command-line", "-n", "--nodes NODES --tasks-per-node TASKS`"),
    "submit train --node 2": ("bad-command-line", "--nodes", "`clusterctl submit JOB -- --node`"),
    "submit train --nodes2 4": ("bad-command-line", "--nodes2", "did you mean --nodes?"),
    "submit train --partion a": ("bad-command-line", "--partion", "did you mean --partition?"),
    "jobz": ("bad-command-line", "'jobs'", "lists the commands"),
    "jobs --al": ("bad-command-line", "--al", "did you mean --all?"),
    "submit train --epochs 3": ("bad-command-line", "--epochs", "`clusterctl submit JOB -- --epochs`"),
    "submit my.sh --dependency 5": ("bad-command-line", "--dependency", "submit JOB --after JOB_ID`"),
    "submit x.py --nodelist a-train-2": ("bad-command-line", "sbatch", " --slurm --nodelist=a-train-2`"),
    "submit x.py -x demo-train-2": ("bad-command-line", "-x", " --slurm --exclude=demo-train-2`"),
    "submit x.py -wa-1": ("bad-command-line", "-w", " --slurm --nodelist=a-1`"),
    "submit x.py --folder none --exclusive --follow": ("bad-command-line", "sbatch", " --slurm --exclusive`"),
    "submit x.py --gres=gpu:2 --wait": ("bad-command-line", "--gres", "`clusterctl submit JOB --gpus "),
    "submit x.py --gres tmpfs:2": ("bad-command-line", "--gres", " --slurm --gres=tmpfs:2`"),
    "submit x.py --gpus-per-task 1": ("bad-command-line", "sbatch", "`clusterctl submit JOB --gpus "),
    "submit x.py --hint --follow": ("bad-command-line", "--hint", " --slurm --hint=VALUE`"),
    "submit x.py --error F": ("bad-command-line", "--error", "leave it out"),
    "submit x.py --comment hi": ("bad-command-line", "--comment", "`clusterctl submit JOB --note "),
    "submit x.py --oversubscribe": ("bad-command-line", "sbatch", " --slurm --oversubscribe`"),
    "submit x.py --export ALL": ("bad-command-line", "sbatch", "`clusterctl submit JOB -- --export`"),
    "submit x.py input.txt": ("words-before-dashes", "input.txt", "submit JOB [OPTIONS] -- input.txt`"),
    "submit x.py --time 5 min -- b": ("words-before-dashes", "min", "submit JOB [OPTIONS] -- min`"),
    "submit torchrun x.py": ("words-before-dashes", "x.py", "submit SCRIPT --launcher torchrun -- "),
    "submit trian": ("unknown-job-type", "'trian'", "did you mean train?"),
    "submit ./xx.py": ("unknown-job-type", "'./xx.py'", "did you mean x.py?"),
    "submit y.py": ("unknown-job-type", "'y.py'", "name a bundled job"),
    "submit": ("bad-command-line", "JOB", "`clusterctl submit --help`"),
    "runs show": ("bad-command-line", "RUN", "`clusterctl runs show --help`"),
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
    assert failure["code"] == code
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
        assert failure["code"] == "program-arguments"
        assert failure["cause"].startswith("train: ")
        assert part in failure["cause"]
        assert "train -- --help`" in failure["fix"]
        # No cluster is looked for before that.
        assert result.stderr.startswith("error: ")


def test_arguments_are_checked_against_the_default_ranks(cli: Clusterctl) -> None:
    result = cli("-o", "json", "submit", "train", "--dry-run", "--", "--zero", "1", rc=2)
    (failure,) = result.json["failures"]
    assert failure["code"] == "program-arguments"
    assert all(part in failure["cause"] for part in ("--zero", "two or more"))


def test_arguments_in_a_job_file_are_checked_before_submission(cli: Clusterctl) -> None:
    (cli.cwd / "job.yaml").write_text(
        "job: train\nvariants: {a: {args: [--lr, 1e-2]}, b: {args: [--lrr, 1e-2]}}\n"
    )
    result = cli("-o", "json", "submit", "job.yaml", rc=2)
    assert codes(result) == ["program-arguments"]
    assert all(
        part in result.stderr for part in ("train: ", "--lrr 1e-2", "mean --lr?", "(train-b)")
    )


def test_error_of_a_sweep_names_the_values(cli: Clusterctl) -> None:
    result = cli(
        "-o", "json", "submit", "train", "--sweep", "model=mlp,gpt-tiny", "--dry-run", rc=2
    )
    (failure,) = result.json["failures"]
    assert failure["code"] == "program-arguments"
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
    assert codes(result) == ["needs-trained-model"]
    assert f" {job} --run RUN\n" in result.stderr
    assert ("or a checkpoint" in result.stderr) == (job in {"eval", "export"})
