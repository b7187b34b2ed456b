"""The manual is run, not believed: here what needs no cluster; tests/e2e/test_manual.py runs the
commands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from clusterctl.cli.main import LazyVerb, app
from clusterctl.errors import ClusterctlError
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from tests.support.manual import ROOT, RUN, Block, blocks, pages

LANGUAGES = {*RUN, "bash", "c", "yaml", "python", "toml", "text", "json", "sudoers", "ts"}
SKILL = ROOT / "skills" / "clusterctl" / "SKILL.md"
ALL = [block for page in pages() for block in blocks(page)]


def inline_code(page: Path) -> list[str]:
    """What stands in backticks in running text and tables."""
    return [
        child.content
        for token in MarkdownIt().enable("table").parse(page.read_text())
        for child in token.children or ()
        if child.type == "code_inline"
    ]


def inline_commands(page: Path) -> list[list[str]]:
    """The words of every `clusterctl ...` in running text and tables."""
    return [_words(span) for span in inline_code(page) if span.startswith("clusterctl ")]


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


# Provider -> the least that a spec with it needs beside the keys that a page shows.
LEAST: dict[str, dict[str, Any]] = {
    "local": {"partitions": [{"name": "train", "nodes": 2}]},
    "gcp": {
        "provider": {"project": "my-project", "zone": "europe-west4-a"},
        "partitions": [{"name": "train", "nodes": 2}],
    },
    "onprem": {
        "provider": {"controller": "head", "hosts": {"head": None, "gpu[01-16]": None}},
        "partitions": [{"name": "train", "hosts": "gpu[01-16]"}],
    },
}


def parts_of_specs() -> list[tuple[str, dict[str, Any]]]:
    """Where pages show keys of a spec in a block, or in braces in the text, and the keys."""
    texts = [
        (block.where, block.text)
        for block in ALL
        if block.language == "yaml" and (not block.words or block.shown_only == "part of a spec")
    ]
    texts += [
        (f"{page.relative_to(ROOT)}: {span}", span)
        for page in pages()
        for span in inline_code(page)
        if re.match(r"\w+: *[\[{]", span) and not re.search(r"…|\.\.\.|[A-Z]{4}", span)
    ]
    shown = [(where, yaml.safe_load(text)) for where, text in texts]
    known = {*ClusterSpec.model_fields}
    return [(at, keys) for at, keys in shown if isinstance(keys, dict) and {*keys} <= known]


def is_valid(keys: Mapping[str, Any], kind: str) -> bool:
    least = {"version": 1, "name": "demo", **LEAST[kind], **keys}
    provider = {"type": kind, **LEAST[kind].get("provider", {}), **keys.get("provider", {})}
    try:
        parse_spec(yaml.safe_dump({**least, "provider": provider}), "a page")
    except ClusterctlError:
        return False
    return True


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


@pytest.mark.parametrize("keys", [pytest.param(keys, id=where) for where, keys in parts_of_specs()])
def test_keys_of_a_spec_on_a_page_are_valid(keys: dict[str, Any]) -> None:
    assert any(is_valid(keys, kind) for kind in LEAST)


def test_wrong_command_on_a_page_is_reported() -> None:
    assert understood(["submit", "train", "--nodes", "2"])
    assert understood(["cache", "prune"])
    assert not understood(["sumbit", "train"])
    assert not understood(["submit", "train", "--nodez", "2"])
    assert not understood(["cache", "trim"])
