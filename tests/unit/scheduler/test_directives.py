"""Flags of `submit` replace the #SBATCH lines of a script that set the same quantity."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.request.directives import Directives
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.request.user_script import UserScript
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.checks import check_directives
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.job_file import jobs_of_file
from tests.support.messages import condition
from tests.support.played.batch import INVENTORY, rendered, user_script

SITE = site_of(INVENTORY)
# The options that clusterctl sets in each job.
ALWAYS = re.compile("--(job-name|output|error)=")
DEPENDENCY = "--dependency=afterany:7,afterok:8_3"


def options_of(folder: Path, lines: str, **flags: Any) -> list[str]:
    """Return the job's #SBATCH lines, except those for its name and its logs."""
    script = user_script(folder, "own.sh", f"#!/bin/bash\n{lines}\ntrue\n#SBATCH --nodes=99\n")
    text = rendered(JobSpec(name="own", script=script, **flags))
    words = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")
    ]
    return [line for line in words if not ALWAYS.match(line)]


# Lines of a script, flags, and the lines of the job. The first of each group are inputs of users.
ROWS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "--nodes=1 --ntasks=1 --mem-per-cpu=300M",
        {"mem": "500M"},
        ["--nodes=1 --ntasks=1", "--mem=500M"],
    ),
    ("--gres=gpu:1", {"gpus": 0}, []),
    ("-N1 -n1", {"nodes": 2, "tasks_per_node": 1}, ["--nodes=2", "--ntasks-per-node=1"]),
    # Short forms, ranges, several options in a line, values in the next word or line, quotes.
    (
        "-N 2-4 -t5 # two\n-HA x",
        {"nodes": 3, "account": "y"},
        ["--time=5", "--hold", "--nodes=3", "--account=y"],
    ),
    ("--nodes\n2 --mail-user='a b'", {"nodes": 3}, ['"--mail-user=a b"', "--nodes=3"]),
    (
        "-c4 --mincpus=8 --hint=multithread",
        {"cpus": 1},
        ["--hint=multithread", "--cpus-per-task=1"],
    ),
    ("--cpus-per-gpu=4 -G2", {"cpus": 2, "gpus": 1}, ["--cpus-per-task=2", "--gpus-per-node=1"]),
    # Lists of resources: only the entries of the quantity.
    ("--gres=gpu:a100:2,tmpfs:1,gpu", {"gpus": 1}, ["--gres=tmpfs:1", "--gpus-per-node=1"]),
    (
        "--tres-per-task=cpu:4,gres/gpu:1",
        {"cpus": 2},
        ["--tres-per-task=gres/gpu:1", "--cpus-per-task=2"],
    ),
    ("--gpus-per-task=1 --gpu-bind=closest", {"gpus": 0}, []),
    ("--gpus-per-socket=1 --gpu-bind=none", {"gpus": 2}, ["--gpu-bind=none", "--gpus-per-node=2"]),
    # Limits, restarts, arrays, dependencies.
    ("--time-min=2 --time=1-0", {"time": "5m"}, ["--time=00:05:00"]),
    ("--requeue --signal=B:TERM@9", {"requeue": False}, ["--signal=B:TERM@9", "--no-requeue"]),
    (
        "--array 0-9 -d singleton",
        {"array": "1", "after": ["7:any", "8_3"]},
        ["--array=1", DEPENDENCY],
    ),
    (
        "-pold --qos=low -Cfast",
        {"partition": "p", "constraint": "c"},
        ["--qos=low", "--partition=p", "--constraint=c"],
    ),
    # The number of tasks: nodes by tasks per node, if both are known.
    ("-N2 --ntasks-per-node=4 -n8", {"nodes": 1}, ["--ntasks-per-node=4", "--nodes=1"]),
    ("-N2 -n8 --ntasks-per-socket=2", {"tasks_per_node": 1}, ["--nodes=2", "--ntasks-per-node=1"]),
    ("-n8", {"nodes": 2}, ["-n8", "--nodes=2"]),
    ("--ntasks=8", {"tasks_per_node": 4}, ["--ntasks=8", "--ntasks-per-node=4"]),
    # Options of --slurm replace those of the script, and stay beside the flags.
    ("-x a-1 -b now", {"slurm": ["--exclude=a-2"]}, ["--begin=now", "--exclude=a-2"]),
    ("--nodefile=a", {"slurm": ["-w a-2 --nice"]}, ["--nodelist=a-2", "--nice"]),
    ("--mem=4G", {"slurm": ["--mem-per-cpu=1G"]}, ["--mem-per-cpu=1G"]),
    # The file that the program reads is beside the script.
    ("--input=in.txt", {}, ["--input=files/in.txt"]),
    ("-N1 -i ./data/../in.txt", {}, ["--nodes=1 --input=files/in.txt"]),
    ("-i /shared/in.txt", {}, ["-i /shared/in.txt"]),
    ("-i a", {"slurm": ["--input b"]}, ["--input=files/b"]),
    # Lines that no flag touches stay as they are; unknown words are left to sbatch.
    (
        "--exclusive  # alone\n--bogus -N2",
        {"mem": "1G"},
        ["--exclusive  # alone", "--bogus -N2", "--mem=1024M"],
    ),
    ("--comment='mine' --chdir=/x -o out", {}, []),
]


@pytest.mark.parametrize(("lines", "flags", "expected"), ROWS)
def test_flag_replaces_its_quantity_alone(
    tmp_path: Path, lines: str, flags: dict[str, Any], expected: list[str]
) -> None:
    assert (
        options_of(tmp_path, re.sub("^", "#SBATCH ", lines, flags=re.MULTILINE), **flags)
        == expected
    )


def test_keys_of_a_job_file_replace_options_too(tmp_path: Path) -> None:
    lines = "#SBATCH -N3 -n9 --mem-per-gpu=1G --gres=gpu:2\n#SBATCH -d singleton --nice"
    user_script(tmp_path, "own.sh", f"#!/bin/bash\n{lines}\ntrue\n")
    keys = "nodes: 1\ntasks_per_node: 2\nmem: 1GiB\ngpus: 0\nafter: [7]\nslurm: [--nice=3]\n"
    file = user_script(
        tmp_path, "job.yaml", f"job: own.sh\n{keys}variants: {{a: {{slurm+: [--hold]}}}}\n"
    )
    (job,) = jobs_of_file(file, {"nodes": 2})
    found = [line for line in rendered(job).splitlines() if line.startswith("#SBATCH")][3:]
    expected = [
        "--nodes=2",
        "--ntasks-per-node=2",
        "--mem=1024M",
        "--dependency=afterok:7",
        "--nice=3",
        "--hold",
    ]
    assert found == [f"#SBATCH {option}" for option in expected]


# Scripts, and texts of the notes about them. The first ones are inputs of users.
NOTES: list[tuple[str, dict[str, Any], list[tuple[str, ...]]]] = [
    (
        (
            "#SBATCH --job-name=heat --output=results/%j.out\n"
            "#SBATCH -e r/%j.err\n"
            "#SBATCH --chdir=/tmp"
        ),
        {},
        [("lines 2, 3:", "--output and --error", "clusterctl logs"), ("line 4:", "--chdir", "cd")],
    ),
    (
        "set -euo pipefail\n#SBATCH --nodes=2\n#SBATCH --time=2",
        {},
        [("lines 3, 4:", "first command")],
    ),
    ('me=$(scontrol show job "$SLURM_JOB_ID" | awk -F= "/Command=/")', {}, [("line 2:", '"$0"')]),
    # Each option once, wherever it is; options that clusterctl honours have no note.
    (
        "#SBATCH -o a\n#SBATCH -o b -o c --open-mode=append",
        {},
        [("lines 2, 3:", "--output and --open-mode")],
    ),
    ("#SBATCH --comment='for the paper'", {}, [("line 2:", "--comment", "--note")]),
    (
        "#SBATCH -J x -N2 -t5 --mem=1G --requeue --nice --mail-user=a@b -d singleton --parsable",
        {},
        [],
    ),
    # The check of the line tells how to do without it.
    ("#SBATCH --wrap=true", {}, []),
    ("#SBATCH --exclde=a", {}, [("line 2:", "--exclde=a", "--exclude")]),
    ("#SBATCH -N1 --zonk\n#SBATCH --zonk", {}, [("lines 2, 3:", "--zonk", "plugin")]),
    ("#SBATCH -J 'Big sim/1'", {}, [("line 2:", "Big-sim-1")]),
    ("#SBATCH -J 'Big sim'", {"name": "big"}, []),
    (
        "#SBATCH --export=ALL,SEED,A=1,PATH",
        {"env": {"PATH2": ""}},
        [("line 2:", "--export=PATH,SEED", "--env PATH --env SEED")],
    ),
    ("#SBATCH --export=SEED", {"env": ["SEED=1"]}, []),
    ("#SBATCH --export=SEED", {"slurm": ["--export=NONE"]}, []),
    ("#SBATCH --export=NONE", {}, []),
    # Lines that are not the script's own.
    ("cat >w.sh <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nEOF\nsbatch w.sh", {}, []),
    ("cat <<-'E O' >w\n#SBATCH -N2\n\tE O\n#SBATCH -N3", {}, [("line 5:",)]),
    ("# don't\necho \"#!/bin/bash\n#SBATCH -N2\" >w\necho it\\'s\n#SBATCH -N4", {}, [("line 6:",)]),
    ("grep x <<<'y'\n#SBATCH -N4", {}, [("line 3:",)]),
    ("# SBATCH -N2\n##SBATCH -N3\ntrue\n# #SBATCH -N4\necho '#SBATCH'", {}, []),
    ("scontrol show job $SLURM_JOB_ID\n# scontrol show job: Command", {}, []),
]


@pytest.mark.parametrize(("text", "flags", "expected"), NOTES)
def test_lines_without_an_effect_have_a_note(
    tmp_path: Path, text: str, flags: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    script = user_script(tmp_path, "own.sh", f"#!/bin/bash\n{text}\n")
    notes = list(Request.read(job_spec(str(script), flags)).notes())
    assert len(notes) == len(expected), notes
    for note, words in zip(notes, expected, strict=True):
        assert [word for word in ("own.sh, ", *words) if word not in note] == []


def test_late_directives_in_a_python_string_are_ignored(tmp_path: Path) -> None:
    text = "import os\nT = '''\n#SBATCH -N2\n'''\n#SBATCH -N3\nprint(T)  #SBATCH\n"
    assert UserScript.read(user_script(tmp_path, "p.py", text)).directives.late == (5,)


@pytest.mark.parametrize(
    ("text", "flags", "name"),
    [
        ("#SBATCH --job-name=heat3d", {}, "heat3d"),
        ("#SBATCH -Jone\n#SBATCH -J two --nodes=1 # three", {}, "two"),
        ("# x\n\n#SBATCH --nodes 1 --job-name 'a b'", {}, "a-b"),
        ("#SBATCH --job-name=v1.2.sh", {}, "v1.2.sh"),
        ("#SBATCH --job-name=heat", {"name": "mine"}, "mine"),
        ("true\n#SBATCH --job-name=late", {}, "own"),
        ("#SBATCH --job-name=", {}, "own"),
        ("#SBATCH --job-name=///", {}, "job"),
        ("#SBATCH --job-name='open", {}, "own"),
    ],
)
def test_job_has_the_name_in_its_script(
    tmp_path: Path, text: str, flags: dict[str, Any], name: str
) -> None:
    script = user_script(tmp_path, "own.sh", f"#!/bin/bash\n{text}\n")
    assert job_spec(str(script), flags).name == name


def test_variants_of_a_script_have_its_name_first(tmp_path: Path) -> None:
    user_script(tmp_path, "own.sh", "#!/bin/bash\n#SBATCH -J heat\n")
    file = user_script(tmp_path, "job.yaml", "job: own.sh\nvariants: {a: {}, b: {name: mine}}\n")
    assert [job.name for job in jobs_of_file(file, {})] == ["heat-a", "mine"]


@pytest.mark.parametrize(
    ("lines", "flags", "shown"),
    [
        ("#SBATCH -N1\n#SBATCH -n1", {"nodes": 2}, ("--ntasks=1", "line 3", "--tasks-per-node")),
        ("#SBATCH --ntasks=2", {"tasks_per_node": 4}, ("--ntasks=2", "line 2", "--nodes")),
        ("#SBATCH --nodelist=a-[1-3]", {"nodes": 2}, ("--nodelist=a-[1-3]", "--nodes 3")),
        ("#SBATCH --mem-per-gpu=4G -G1", {"gpus": 0}, ("--mem-per-gpu=4G", "--mem")),
        ("#SBATCH -G1 --ntasks-per-gpu=2", {"gpus": 0}, ("--ntasks-per-gpu=2", "--tasks-per-node")),
        ("#SBATCH --gres=gpu:1", {"slurm": ["--gres=tmpfs:1"]}, ("--gres=gpu:1", "--gpus")),
        ("#SBATCH --time=5\n\n# x\n#SBATCH --wait", {}, ("--wait", "line 5", "submit --wait")),
        ("#SBATCH --test-only", {}, ("--test-only", "submit --dry-run")),
        ("#SBATCH --wrap=hostname", {}, ("--wrap=hostname", "line 2")),
        ("#SBATCH --comment='open", {}, ("line 2", "own.sh")),
    ],
)
def test_line_that_contradicts_a_flag_is_refused_by_name(
    tmp_path: Path, lines: str, flags: dict[str, Any], shown: tuple[str, ...]
) -> None:
    script = user_script(tmp_path, "own.sh", f"#!/bin/bash\n{lines}\ntrue\n")
    job = JobSpec(name="own", script=script, **flags)
    (fault,) = check_directives(SITE, Request.read(job))
    assert condition(fault) == "option-invalid/directive"
    assert [text for text in shown if text not in str(fault)] == []


def test_heterogeneous_job_is_refused(tmp_path: Path) -> None:
    script = user_script(tmp_path, "het.sh", "#!/bin/bash\n#SBATCH -N1\n#SBATCH hetjob\n")
    (fault,) = check_directives(SITE, Request.read(JobSpec(name="h", script=script)))
    assert (condition(fault), "het.sh" in str(fault.where)) == ("unsupported/heterogeneous", True)


def test_directives_end_at_the_first_command() -> None:
    text = (
        "#!/bin/bash\n\n  # indented\n#SBATCH -N2\n#SBATCH--time=5\n #SBATCH -n9\necho\n#SBATCH -c3"
    )
    found = Directives.read(Path("a.sh"), text.split("\n"))
    assert found.lines == ("#SBATCH -N2", "#SBATCH--time=5")
    assert [(str(request), request.line) for request in found.options] == [
        ("--nodes=2", 4),
        ("--time=5", 5),
    ]


def test_last_value_of_an_option_counts() -> None:
    found = Directives.read(Path("a.sh"), ["#SBATCH -N2 --nodes=3", "#SBATCH -c1"])
    assert str(found.last("nodes")) == "--nodes=3"
    assert found.last("ntasks") is None
