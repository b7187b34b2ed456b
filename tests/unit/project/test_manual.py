"""The manual is run, not believed: here what needs no cluster; tests/e2e/test_manual.py runs the
commands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from clusterctl.cli.main import LazyVerb, app
from tests.support.manual import ROOT, RUN, Block, blocks, pages

LANGUAGES = {*RUN, "bash", "c", "yaml", "python", "toml", "text", "json", "sudoers"}
SKILL = ROOT / "skills" / "clusterctl" / "SKILL.md"
ALL = [block for page in pages() for block in blocks(page)]


def inline_commands(page: Path) -> list[list[str]]:
    """The words of every `clusterctl ...` in running text and tables."""
    spans = [
        child.content
        for token in MarkdownIt().enable("table").parse(page.read_text())
        for child in token.children or ()
        if child.type == "code_inline"
    ]
    return [_words(span) for span in spans if span.startswith("clusterctl ")]


def of_clusterctl(block: Block) -> list[list[str]]:
    """The words of every clusterctl command of a block, run or not."""
    texts = [command.text for command in block.commands] if block.language in RUN else []
    lines = [
        part
        for text in texts
        for line in text.splitlines()
        for part in re.split(r"&&|\|\|?|;", line)
    ]
    return [_words(line) for line in lines if line.strip().startswith("clusterctl ")]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that is closed further down
        return text.split()


def understood(words: list[str]) -> bool:
    """Whether these words after `clusterctl` name a verb that exists, with options that it has."""
    command = app
    words = words[: words.index("--")] if "--" in words else words
    known = names(command)
    for word in words:
        subcommands = getattr(command, "commands", {})
        # The name of stdin is no option.
        if word.startswith("-") and word != "-":
            if word.partition("=")[0].rstrip("],") not in known:
                return False
        elif word in subcommands:
            command = subcommands[word]
            command = command.load() if isinstance(command, LazyVerb) else command
            known |= names(command)
        elif subcommands and word.isalpha() and word.islower():
            return False
    return True


def names(command: object) -> set[str]:
    """Its options; of a group that lists where no verb is named, those of that verb."""
    lists = getattr(command, "commands", {}).get("list")
    params = [
        *getattr(command, "params", []),
        *(lists.load().params if isinstance(lists, LazyVerb) else ()),
    ]
    return {name for param in params for name in (*param.opts, *param.secondary_opts)} | {
        "--help",
        "-h",
    }


def named(block: Block) -> str:
    return block.where


def test_block_has_a_language() -> None:
    # Fence these as one of LANGUAGES.
    assert [block.where for block in ALL if block.language not in LANGUAGES] == []


def test_block_that_is_not_run_has_no_commands() -> None:
    hidden = [
        block.where
        for block in ALL
        if block.language not in RUN
        for line in block.text.splitlines()
        if line.startswith(("$ ", "clusterctl ", "make ", "sudo ", "ssh ", "pip ", "pipx "))
    ]
    # Fence these as console or sh.
    assert hidden == []


def test_block_of_commands_is_run_or_has_a_reason() -> None:
    for block in ALL:
        if block.language in RUN and not block.shown_only:
            assert block.words in {"", "figures"} or block.words.startswith("rc="), (
                f"{block.where}: {block.words!r}?"
            )
            # Commands begin with `$ `.
            assert block.commands, block.where


def test_block_run_by_another_test_names_an_existing_file() -> None:
    for block in ALL:
        if block.elsewhere:
            assert (ROOT / block.elsewhere).is_file(), block.where


@pytest.mark.parametrize("page", [*pages(), SKILL], ids=lambda page: page.name)
def test_clusterctl_commands_on_a_page_parse(page: Path) -> None:
    """Also those in running text, and in blocks that are not run."""
    found = inline_commands(page) + [
        words for block in blocks(page) for words in of_clusterctl(block)
    ]
    wrong = [" ".join(words) for words in found if not understood(words[1:])]
    assert not wrong


def test_wrong_command_on_a_page_is_reported() -> None:
    assert understood(["submit", "train", "--nodes", "2"])
    assert understood(["cache", "prune"])
    assert not understood(["sumbit", "train"])
    assert not understood(["submit", "train", "--nodez", "2"])
    assert not understood(["cache", "trim"])
