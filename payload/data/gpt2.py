"""GPT-2's tokens (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2),
by its files: byte pairs, merged within words as ``merges.txt`` orders, numbered by ``vocab.json``."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.data.tokenizer import Merge, encoded, merged
from payload.device.base import Array
from payload.errors import UsageError

END = "<|endoftext|>"
"""Stands between two texts."""

_WHITE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space but the blank; ``str.isspace`` knows four more."""


class _Classes(dict[int, str]):
    """For ``str.translate``: a letter as L, a number as 0, white space as a tab, and others as a dot. The
    blank and what GPT-2 knows contractions by stay."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = {"L": "L", "N": "0"}.get(unicodedata.category(char)[0], ".")
        self[code] = char if char in " 'stremvld" else "\t" if char in _WHITE else kind
        return self[code]


_CLASSES = _Classes()
# GPT-2's own: '(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+, but re has no \p.
_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[Lstremvld]+| ?0+| ?['.]+|[ \t]+(?![^ \t])|[ \t]+")


def _characters() -> Iterator[str]:
    """Of each byte, the character that stands for it in the files: what is printable stands for itself."""
    others = 0
    for byte in range(256):
        if chr(byte).isprintable() and byte != ord(" "):
            yield chr(byte)
        else:
            yield chr(256 + others)
            others += 1


_BYTE_OF = {char: byte for byte, char in enumerate(_characters())}


class GPT2:
    """GPT-2's tokens, or others of that kind; as ``Tokenizer``."""

    kind = "gpt2"

    def __init__(
        self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], added: Mapping[str, int]
    ) -> None:
        """
        Args:
            vocabulary: numbers of tokens, as the files spell them.
            merges: pairs of tokens, of which those come first that are merged first.
            added: numbers of words that are one token wherever a text has them.

        Raises:
            KeyError, TypeError, ValueError: a token that is needed has no number.
        """
        self.name = self.kind
        self.size = max([*vocabulary.values(), *added.values()]) + 1
        self.data_state: Mapping[str, Any] = {
            "vocabulary": dict(vocabulary),
            "merges": list(merges),
            "added": dict(added),
        }
        self._bytes = [vocabulary[char] for char in _BYTE_OF]
        self._merges: dict[Merge, tuple[int, int]] = {}  # to the rank and the token that it makes
        for rank, (left, right) in enumerate(merges):
            self._merges[vocabulary[left], vocabulary[right]] = rank, vocabulary[left + right]
        texts = {token: _text(token) for token in vocabulary} | {word: word.encode() for word in added}
        self._texts = {number: texts[token] for token, number in {**vocabulary, **added}.items()}
        self._added = dict(added)
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(longest_first)})") if added else None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> GPT2:
        """Of what ``data_state`` was.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """
        vocabulary, added = (
            {str(token): int(number) for token, number in record[name].items()}
            for name in ("vocabulary", "added")
        )
        return cls(vocabulary, [(left, right) for left, right in record["merges"]], added)

    def encode(self, text: bytes) -> Array:
        """(bytes,) → (tokens,); what is no UTF-8 is told byte by byte."""
        return encoded(self._words(text.decode(errors="surrogateescape")), self._tokens_of, self.size)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The text of tokens; those that have no text are left out."""
        return b"".join(self._texts.get(int(token), b"") for token in tokens)

    def _words(self, text: str) -> Iterator[str]:
        for piece in self._cut.split(text) if self._cut else [text]:
            if piece in self._added:
                yield piece
            else:
                for found in _WORDS.finditer(piece.translate(_CLASSES)):
                    yield piece[found.start() : found.end()]

    def _tokens_of(self, word: str) -> list[int]:
        if word in self._added:
            return [self._added[word]]
        return merged([self._bytes[byte] for byte in word.encode(errors="surrogateescape")], self._merges)


def _text(token: str) -> bytes:
    """What a token of the files stands for."""
    return (
        bytes(_BYTE_OF[char] for char in token) if all(char in _BYTE_OF for char in token) else token.encode()
    )


def load(folder: Path) -> GPT2:
    """The tokens of a folder with ``tokenizer.json``, or else with ``vocab.json`` and ``merges.txt``.

    Raises:
        UsageError: they cannot be read, or are not of GPT-2's kind.
    """
    try:
        if (file := folder / "tokenizer.json").exists():
            return GPT2.read(_of_tokenizer_json(json.loads(file.read_bytes())))
        vocabulary = json.loads((file := folder / "vocab.json").read_bytes())
        lines = (file := folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        file = folder
        added = {END: vocabulary[END]} if END in vocabulary else {}
        return GPT2.read({"vocabulary": vocabulary, "merges": merges, "added": added})
    except OSError as exc:
        raise UsageError(
            f"--tokenizer: {file} cannot be read: {exc.strerror}", code="file-unreadable"
        ) from exc
    except KeyError as exc:
        raise UsageError(
            f"--tokenizer: {file}: there is no {exc} among the tokens", code="tokenizer-token-missing"
        ) from exc
    except (ValueError, TypeError, AttributeError) as exc:
        raise UsageError(f"--tokenizer: {file} is not as GPT-2's: {exc}", code="tokenizer-not-gpt2") from exc


def _of_tokenizer_json(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a record of ``GPT2``. The errors of another kind of file are those of ``GPT2.read``."""
    model, before = content["model"], content["pre_tokenizer"]
    kinds = model["type"], before["type"], before.get("use_regex", True), content.get("normalizer")
    if kinds != ("BPE", "ByteLevel", True, None) or before.get("add_prefix_space"):
        raise ValueError(
            f"it cuts text by {before['type']} and {model['type']}, in a way that is not known here"
        )
    return {
        "vocabulary": model["vocab"],
        "merges": [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]],
        "added": {added["content"]: added["id"] for added in content.get("added_tokens") or ()},
    }
