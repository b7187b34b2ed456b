"""Tests of redaction: the secrets and notations that are removed, and the text that stays."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Final

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.spec.load import yaml_text
from clusterctl.util.redact import HIDDEN, looks_secret, patterns, redactor
from tests.unit.util.planted import FACTS, PLANTED, PORTS

# Notations of a password in logs, specs and command lines, beside the ordinary number 7777.
NOTATIONS: Final[dict[str, Callable[[str], str]]] = {
    "YAML": lambda word: yaml_text({"db": {"password": word, "port": 7777}}),
    "YAML, single quotes": lambda word: "password: '{}'\nport: 7777".format(
        word.replace("'", "''")
    ),
    "JSON": lambda word: json.dumps({"password": word, "port": 7777}),
    "JSON in JSON": lambda word: json.dumps(
        {"stdout": json.dumps({"password": word, "port": 7777})}
    ),
    "Python": lambda word: repr({"password": word, "port": 7777}),
    "a variable of a shell": lambda word: f"DB_PASSWORD={shlex.quote(word)}\nport=7777",
    "a shell in JSON": lambda word: json.dumps(
        {"cmd": f"PASSWORD={shlex.quote(word)}", "port": 7777}
    ),
    "an option": lambda word: f"app --password={shlex.quote(word)} --port 7777",
    "a list of arguments": lambda word: json.dumps(
        {"cmd": ["app", "--password", word], "port": 7777}
    ),
    "arguments of curl": lambda word: json.dumps(
        {"cmd": ["curl", "-u", f"a:{word}"], "port": 7777}
    ),
    "pairs in JSON": lambda word: json.dumps(
        {"env": [{"name": "PASSWORD", "value": word}], "port": 7777}
    ),
    "pairs in YAML": lambda word: yaml.safe_dump(
        {"env": [{"name": "PASSWORD", "value": word}], "port": 7777}, sort_keys=False, width=2**16
    ),
}
SPECIAL: Final = "!@#$%^&*()-_=+[]{};:,.<>/?|~ '\""


def test_redact_removes_planted_secrets_and_keeps_the_text_around() -> None:
    redact = redactor(())
    redacted = {secret: redact(text) for secret, text in PLANTED.items()}
    assert not {secret: text for secret, text in redacted.items() if secret in text}
    for secret, text in PLANTED.items():
        assert not [
            port for port in PORTS if str(port) in text and str(port) not in redacted[secret]
        ], text


def test_redact_keeps_facts() -> None:
    assert redactor(())(FACTS) == FACTS


def test_secret_form_removed_leaves_a_planted_secret() -> None:
    def leaks(without: str) -> bool:
        redact = redactor((), (pattern for name, pattern in patterns().items() if name != without))
        return any(secret in redact(text) for secret, text in PLANTED.items())

    assert not [name for name in patterns() if not leaks(name)]


@given(st.lists(st.text("abcxyzABCXYZ012789", min_size=5, max_size=5), min_size=1), st.data())
def test_redact_removes_a_password_in_any_notation(parts: list[str], data: st.DataObject) -> None:
    marks = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=len(parts), max_size=len(parts)))
    word = "".join(f"{part}{mark}" for part, mark in zip(parts, marks, strict=True)).strip()
    redact = redactor(())
    for notation, write in NOTATIONS.items():
        text = redact(write(word))
        assert not [part for part in parts if part in text], notation
        assert "7777" in text, notation


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("HF_TOKEN", "abc", True),
        ("WANDB_API_KEY", "0123456789abcdef", True),
        ("db_password", "x", True),
        ("GITHUB_PAT", "x", True),
        ("X", "hf_" + "aB3" * 12, True),
        ("X", "sk-" + "aB3" * 14, True),
        ("X", "postgres://ada:pw@db/x", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MAX_TOKENS", "4096", False),
        ("PAD_TOKEN", "0", False),
        ("SSH_KEY", "/home/ada/.ssh/id", False),
        ("USE_TOKEN", "true", False),
        ("LR", "0.1", False),
        ("MONKEY", "banana", False),
    ],
)
def test_variable_looks_secret_by_its_name_or_its_value(
    name: str, value: str, is_secret: bool
) -> None:
    assert looks_secret(name, value) is is_secret


def test_redact_keeps_short_words() -> None:
    redact = redactor(["ab", b"longer-secret"])
    assert redact("about longer%2Dsecret longer-secret") == f"about longer%2Dsecret {HIDDEN}"
