"""GPT-2's tokens, by a small vocabulary of its kind; test_payload_libraries.py compares with
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.cli.arguments import parse
from payload.comm.base import Solo
from payload.data.datasets import open_dataset
from payload.data.gpt2 import GPT2, load
from payload.errors import UsageError
from tests.support.messages import refused

# As the files spell bytes: Ġ is the blank, Ċ a newline. Some merges would go beyond a word, and
# never happen.
_MERGES = "h e|l l|he ll|hell o|Ġ w|' s|Ġ Ġ|Ġ Ċ|a Ġ|a 1|1 '|s '|Ã ©|é Ġ|! !|! a".split("|")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _tokens() -> dict[str, int]:
    """Numbers that are not in the order of bytes, nor of merges."""
    chars = [chr(byte) for byte in _PRINTABLE] + [
        chr(256 + other) for other in range(256 - len(_PRINTABLE))
    ]
    pairs = list(
        dict.fromkeys(pair.replace(" ", "") for pair in [*_MERGES[:12], "Ã ©", "! !", "! a"])
    )
    joined = [*pairs, "Ã©Ġ"]
    return {token: number for number, token in enumerate([*joined, *chars, "<|endoftext|>"])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    merges = [line.replace("é Ġ", "Ã© Ġ") for line in _MERGES]
    (tmp_path / "vocab.json").write_text(json.dumps(_tokens()))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", "hello"),
        ("hell hello", "hell| |hello"),
        (" w w", " w| w"),
        ("a w", "a| w"),
        ("a1", "a|1"),
        ("1's", "1|'s"),
        ("s'sa", "s|'s|a"),
        ("!!a!!", "!!|a|!!"),
        ("a  w", "a| | w"),
        ("a  \n", "a|  |\n"),
        ("é é", "é| |é"),
        ("he<|endoftext|>ll", "he|<|endoftext|>|ll"),
        ("", ""),
    ],
)
def test_tokenizer_splits_and_merges_like_gpt2(folder: Path, text: str, tokens: str) -> None:
    tokenizer = load(folder)
    expected = tokens.replace("<|endoftext|>", "<END>").split("|") if tokens else []
    numbers = tokenizer.encode(text.encode())
    pieces = [tokenizer.decode([int(number)]).decode() for number in numbers]
    assert pieces == [piece.replace("<END>", "<|endoftext|>") for piece in expected]
    assert numbers.dtype == "uint16"


def test_tokens_have_the_numbers_of_the_vocabulary(folder: Path) -> None:
    tokenizer = load(folder)
    known = _tokens()
    assert tokenizer.size == len(known)
    found = tokenizer.encode(b"hello w<|endoftext|>").tolist()
    assert found == [known["hello"], known["Ġw"], known["<|endoftext|>"]]


def test_tokenizer_encodes_and_decodes_any_bytes(folder: Path) -> None:
    tokenizer = load(folder)
    text = bytes(range(256)) * 2 + "é€".encode()[:-1]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert GPT2.read(json.loads(json.dumps(tokenizer.data_state))).encode(text).tolist() == (
        tokenizer.encode(text).tolist()
    )


def test_tokenizer_json_alone_is_loaded(folder: Path) -> None:
    expected = load(folder)
    pairs = [list(pair) for pair in expected.data_state["merges"]]
    added = [
        {"content": "<|endoftext|>", "id": expected.size - 1},
        {"content": "<|", "id": expected.size},
    ]
    content = {
        "model": {"type": "BPE", "vocab": _tokens(), "merges": pairs},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": added,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(folder)
    text = b"hello<|<|endoftext|>"
    assert tokenizer.encode(text).tolist() == [_tokens()["hello"], expected.size, expected.size - 1]
    content["pre_tokenizer"] = {"type": "Metaspace"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with refused("tokenizer-not-gpt2", UsageError, "tokenizer.json", "Metaspace and BPE"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "code", "value"),
    [
        ("merges.txt", None, "file-unreadable", "merges.txt"),
        ("vocab.json", "[]", "tokenizer-not-gpt2", "'list'"),
        ("vocab.json", "{", "tokenizer-not-gpt2", "vocab.json"),
        ("vocab.json", '{"a": 0}', "tokenizer-token-missing", "'Ā'"),
        ("merges.txt", "h q", "tokenizer-token-missing", "'hq'"),
        ("merges.txt", "h e l", "tokenizer-not-gpt2", "too many"),
    ],
)
def test_files_that_are_not_gpt_2s(
    folder: Path, name: str, content: str | None, code: str, value: str
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with refused(code, UsageError, value):
        load(folder)


def test_tokenizer_of_a_resumed_run_needs_no_files(folder: Path) -> None:
    text = folder / "text"
    text.write_text("hello w " * 200)
    flags = (
        f"train --model gpt-tiny --sequence-length 8 --data text:{text} --tokenizer gpt2:{folder}"
    )
    first = open_dataset(parse(flags.split()), Solo())
    (folder / "merges.txt").unlink()
    again = open_dataset(parse(flags.split()), Solo(), json.loads(json.dumps(first.data_state)))
    assert again.about == first.about
    assert again.data_state["added"] == {"<|endoftext|>": len(_tokens()) - 1}
    assert parse(flags.split()).placed().data.tokenizer == f"gpt2:{folder}"
