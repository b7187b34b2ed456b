"""What a command line is answered with: exit codes, one shape of error, options on both sides of
the verb.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl import __version__
from tests.support.messages import codes, condition
from tests.support.verbs import Clusterctl, CommandResult

SPEC = (
    "version: 1\n"
    "name: {name}\n"
    "provider: {{type: local}}\n"
    "partitions:\n"
    "  - {{name: train, nodes: 3}}\n"
)
BAD_SPEC = SPEC.format(name="BAD").replace("nodes", "noodles")

REFUSED = {
    "an unknown option before the verb": (
        ["--fast", "up"],
        "option-invalid/command-line",
        "--fast",
    ),
    "an option without its value": (["up", "-f"], "option-invalid/command-line", "'-f'"),
    "an unknown format": (["up", "-o", "yaml"], "option-invalid/command-line", "'yaml'"),
    "a folder of no name": (["collect", "--out", ""], "option-invalid/command-line", "--out"),
    "nothing to put": (["put", ""], "option-invalid/path", "path"),
    "nowhere to put it": (["put", ".", ""], "option-invalid/path", "path"),
    "nothing to get": (["get", ""], "option-invalid/path", "path"),
    "no job to cancel": (["cancel"], "option-invalid/command-line", "ID"),
    "bytes as they are, in JSON": (["logs", "1", "--raw"], "options-exclusive", "--raw"),
    "messages about stacks": (
        ["logs", "1", "--stacks", "--notify", "true"],
        "options-exclusive",
        "--notify",
    ),
    "a word too many": (["schema", "extra"], "option-invalid/command-line", "extra"),
    "no spec file of that name": (["-f", "missing.yaml", "up"], "not-found/file", "missing.yaml"),
    "no cluster of that name": (["status"], "not-up", "'local'"),
}


def failures(result: CommandResult) -> list[dict[str, object]]:
    assert result.json["ok"] is False
    return list(result.json["failures"])


@pytest.mark.parametrize("wrong", REFUSED)
def test_wrong_command_is_one_error_with_a_fix(cli: Clusterctl, wrong: str) -> None:
    argv, code, named = REFUSED[wrong]
    result = cli("-o", "json", *argv, rc=2)
    (failure,) = failures(result)
    assert condition(failure) == code
    assert named in str(failure["cause"])
    assert failure["fix"]
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert named in error
    assert "\n  fix: " in result.stderr
    assert "Value error" not in result.stderr


@pytest.mark.parametrize("json", [["-ojson"], ["--output", "json"], ["--output=json"]], ids="".join)
def test_json_output_has_several_spellings(cli: Clusterctl, json: list[str]) -> None:
    assert failures(cli(*json, "launch", rc=2))
    assert failures(cli("up", *json, "--fast", rc=2))
    assert cli("validate", *json).json["ok"] is True


def test_arguments_after_two_dashes_are_not_options(cli: Clusterctl) -> None:
    result = cli("submit", "--bogus", "--", "-o", "json", rc=2)
    assert result.stdout == ""
    assert "--bogus" in result.stderr


def test_spec_problems_are_one_failure_each(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(BAD_SPEC)
    result = cli("validate", "-o", "json", rc=2)
    causes = [str(failure["cause"]) for failure in failures(result)]
    assert [cause.partition("cluster.yaml:")[2].split(":")[0] for cause in causes] == ["2", "5"]


def test_spec_file_without_its_option_names_the_option(cli: Clusterctl) -> None:
    assert "`-f brk.yaml`" in cli("up", "brk.yaml", rc=2).stderr
    assert "`--file 'my spec.yml'`" in cli("logs", "1", "my spec.yml", rc=2).stderr
    assert "`clusterctl up --help`" in cli("up", "demo", rc=2).stderr


def test_command_without_a_verb_shows_the_help_and_fails(cli: Clusterctl) -> None:
    result = cli(rc=2)
    assert result.stderr.count("Usage: clusterctl") == 1
    assert "\n  submit " in result.stderr
    assert "..." not in result.stderr.partition("Commands:")[2], (
        "a verb's first sentence is too long for its line"
    )
    assert result.stdout == ""
    assert "Usage: clusterctl node" in cli("node", rc=2).stderr
    (failure,) = failures(cli("-o", "json", rc=2))
    assert condition(failure) == "option-invalid/command-line"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_a_result(cli: Clusterctl, option: str) -> None:
    for argv in ([], ["up"], ["submit"], ["cache", "prune"]):
        result = cli(*argv, option)
        assert result.stdout.startswith(f"Usage: clusterctl {' '.join(argv)}".rstrip())
        assert result.stderr == ""


def test_version(cli: Clusterctl) -> None:
    assert cli("--version").stdout == f"clusterctl {__version__}\n"
    module = [sys.executable, "-m", "clusterctl", "--version"]
    assert subprocess.check_output(module, text=True, timeout=60) == f"clusterctl {__version__}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("verb", "code"), [("list", 0), ("submit --dry-run ./missing.py", 2)])
def test_closed_standard_streams_are_like_dev_null(
    cli: Clusterctl, verb: str, code: int, closed: str
) -> None:
    argv = ["sh", "-c", f'"$0" -m clusterctl {verb} {closed}', sys.executable]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code
    assert "Traceback" not in ended.stdout + ended.stderr


def test_common_options_work_on_either_side_of_the_verb(cli: Clusterctl) -> None:
    for name in ("first", "second"):
        (cli.cwd / f"{name}.yaml").write_text(SPEC.format(name=name))
    first = ("-f", "first.yaml")
    json = ("-o", "json")
    expected = {"ok": True, "failures": [], "cluster": "first", "provider": "local", "nodes": 3}
    before = (*first, *json, "-v", "--no-color")
    assert cli(*before, "validate").json == expected
    assert cli("validate", *before).json == expected
    assert cli("--verbose", "--file", "first.yaml", "validate", "--output", "json").json == expected
    # What stands nearer to the verb's end wins.
    assert cli("-f", "second.yaml", "validate", *first, *json).json == expected
    assert cli(*json, "validate", *first, "-o", "text").stdout.startswith("valid: cluster 'first'")


def test_init_writes_a_file_that_validates_and_overwrites_none(cli: Clusterctl) -> None:
    assert cli("init", "-o", "json").json["file"] == "cluster.yaml"
    assert cli("validate").stderr == ""
    (cli.cwd / "cluster.yaml").write_text("precious")
    assert "--force" in cli("init", rc=2).stderr
    assert codes(cli("-o", "json", "init", "-f", "nowhere/x.yaml", rc=2)) == ["file-unwritable"]
    assert (cli.cwd / "cluster.yaml").read_text() == "precious"


def test_init_writes_the_examples_and_overwrites_none(cli: Clusterctl) -> None:
    files = cli("init", "--examples", "-o", "json").json["files"]
    assert {"README.md", "LICENSE", "torch_ddp.py", "jax_dp.py"} <= set(files)
    program = cli.cwd / "examples" / "torch_ddp.py"
    program.write_text("mine")
    assert "--force" in cli("init", "--examples", rc=2).stderr
    assert program.read_text() == "mine"
    cli("init", "--examples", "--force")
    assert "DistributedDataParallel" in program.read_text()
    assert not (cli.cwd / "cluster.yaml").exists()


def test_reading_verbs_create_no_files(cli: Clusterctl) -> None:
    cli("validate")
    cli("status", rc=2)
    cli("schema")
    assert not cli.home.exists()
    assert list(cli.cwd.iterdir()) == []


def test_spec_file_may_have_any_name(cli: Clusterctl) -> None:
    names = ["my spec.yaml", "naïve.yaml", "[bold]x.yaml", "$(touch pwned).yaml"]
    for name in names:
        (cli.cwd / name).write_text(SPEC.format(name="odd"))
        cli("validate", "-f", name)
    assert "[bold]y.yaml" in cli("validate", "-f", "[bold]y.yaml", rc=2).stderr
    assert sorted(path.name for path in cli.cwd.iterdir()) == sorted(names)
    assert codes(cli("-o", "json", "validate", "-f", Path("\udcff.yaml"), rc=2)) == [
        "not-found/file"
    ]
