"""How the commands of the manual are read, and how their output is compared with what they print
here: tests/support/manual.py.
"""

from __future__ import annotations

import pytest

from tests.support.manual import ROOT, Block, Command, with_jobs


def block(text: str, words: str = "", language: str = "console") -> Block:
    """A block of README.md. words: what follows the language in its first line."""
    return Block(ROOT / "README.md", 1, language, words, text)


def command(*prints: str, figures: bool = False) -> Command:
    """A command of a page, and the lines that the page shows."""
    return Command("README.md:1", "x", prints, figures=figures)


# Reading blocks.


def test_console_block_has_commands_and_what_they_print() -> None:
    """`> ` continues a command, and `rc=1` is the exit code of the last one."""
    first, second = block("$ cat <<E\n> x\n> E\nx\n$ false\nodd\n", "rc=1").commands
    assert first == Command("README.md:2", "cat <<E\nx\nE", ("x",))
    assert second == Command("README.md:6", "false", ("odd",), exit_code=1)


def test_script_is_one_command_that_ends_at_its_first_failure() -> None:
    (script,) = block("true\nfalse\n", language="sh").commands
    assert script.text == "set -e\ntrue\nfalse\n"


def test_block_that_is_not_run_gives_its_reason() -> None:
    shown = block("$ x\n", "no-run: needs a GPU")
    assert shown.shown_only == "needs a GPU"
    assert not shown.runs


def test_block_that_gives_no_reason_is_run() -> None:
    careless = block("$ x\n", "no-run:")
    assert not careless.shown_only
    assert careless.runs


def test_block_with_a_name_is_a_file() -> None:
    assert block("a: 1\n", "a.yaml", "yaml").file == "a.yaml"


# Comparing output. `differs` returns the first line of the page that was not printed.


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        # The page's lines come in their order, between others; words with digits may differ.
        ("noise\nepoch 7 loss 0.1\nepoch 8 loss 0.1\ndone, job 3\n", ""),
        ("done, job 3\nepoch 7 loss 0.1\n", "done, job 12"),
        ("epoch 7 loss 0.1\ndone, job three\n", "done, job 12"),
    ],
    ids=["all", "wrong-order", "no-digit"],
)
def test_output_must_have_the_lines_of_the_page(printed: str, missing: str) -> None:
    shown = command("epoch  1  loss 0.5", "...", "done, job 12")
    assert shown.differs(printed) == missing


@pytest.mark.parametrize(
    ("printed", "differs"), [("made 9 things, a", False), ("made 9 nodes", True)]
)
def test_dots_stand_for_the_rest_of_a_line(printed: str, differs: bool) -> None:
    assert bool(command("made 7 things, ...").differs(printed)) is differs


@pytest.mark.parametrize(
    ("printed", "differs"), [("in /home/kim-2: done", False), ("in /home/: done", True)]
)
def test_ada_stands_for_any_user(printed: str, differs: bool) -> None:
    assert bool(command("in /home/ada: done").differs(printed)) is differs


@pytest.mark.parametrize(
    ("printed", "differs"),
    [
        ("job 7: loss 0.106 after 46 steps", False),
        ("job 3: loss 0.26 after 46 steps", True),
        ("job 3: loss 0.103 after 47 steps", True),
    ],
    ids=["within-5%", "another-loss", "another-count"],
)
def test_figures_must_agree(printed: str, differs: bool) -> None:
    """Measured numbers within 5%, counts exactly. The number of a job is no figure."""
    shown = command("job 3: loss 0.103 after 46 steps", figures=True)
    assert bool(shown.differs(printed)) is differs


# Job IDs.


def test_job_of_the_page_is_known_by_its_id_here() -> None:
    shown = command("epoch  1  loss 0.5", "done, job 12")
    assert shown.jobs("epoch 7 loss 0.1\ndone, job 3\n") == {"12": "3"}


def test_later_commands_get_the_id_that_the_job_has_here() -> None:
    """Also with a task and in the name of a run, but not in a decimal number, nor as the value of an
    option.
    """
    typed = "logs 12 -f; cancel 12_3; sleep 0.12; submit --nodes 12 --after 12 --from-run runs/demo-12-count"
    assert with_jobs(typed, {"12": "3"}) == (
        "logs 3 -f; cancel 3_3; sleep 0.12; submit --nodes 12 --after 3 --from-run runs/demo-3-count"
    )
