"""GPT-2's tokenizer: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
part 2.2.

The file ``merges.txt`` lists the pairs of tokens to merge, in order. ``vocab.json`` has the tokens'
numbers.
"""

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
"""The token between two texts."""

_WHITE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""Unicode's White_Space except the blank. ``str.isspace`` accepts four more characters."""


class _Classes(dict[int, str]):
    """A table for ``str.translate``: letters become L, numbers 0, white space a tab, other
    characters a dot.

    Blanks, ' and the letters of contractions ('s, 're) stay, because GPT-2's regular expression has
    them.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = {"L": "L", "N": "0"}.get(unicodedata.category(char)[0], ".")
        self[code] = char if char in " 'stremvld" else "\t" if char in _WHITE else kind
        return self[code]


_CLASSES = _Classes()
# GPT-2's pattern is '(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+; re
# lacks \p.
_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[Lstremvld]+| ?0+| ?['.]+|[ \t]+(?![^ \t])|[ \t]+")


def _characters() -> Iterator[str]:
    """Yield, for each byte from 0 to 255, the printable character that represents it in
    ``vocab.json``.
    """
    escaped = 0
    for byte in range(256):
        if chr(byte).isprintable() and byte != ord(" "):
            yield chr(byte)
        else:
            yield chr(256 + escaped)
            escaped += 1


_BYTE_OF = {char: byte for byte, char in enumerate(_characters())}


class GPT2:
    """A ``Tokenizer`` with the tokens of GPT-2 or of another tokenizer that works in the same
    way.
    """

    kind = "gpt2"

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        added: Mapping[str, int],
    ) -> None:
        """
        Args:
            vocabulary: number of each token, by its spelling in ``vocab.json``.
            merges: pairs of tokens in the order of merging.
            added: number of each special token, such as <|endoftext|>.

        Raises KeyError, TypeError or ValueError if a required token has no number.
        """
        self.name = self.kind
        self.size = max([*vocabulary.values(), *added.values()]) + 1
        self.data_state: Mapping[str, Any] = {
            "vocabulary": dict(vocabulary),
            "merges": list(merges),
            "added": dict(added),
        }
        self._bytes = [vocabulary[char] for char in _BYTE_OF]
        # Each pair of tokens has the rank of its merge, and the resulting token.
        self._merges: dict[Merge, tuple[int, int]] = {}
        for rank, (left, right) in enumerate(merges):
            self._merges[vocabulary[left], vocabulary[right]] = rank, vocabulary[left + right]
        texts = {token: _text(token) for token in vocabulary} | {
            word: word.encode() for word in added
        }
        self._texts = {number: texts[token] for token, number in {**vocabulary, **added}.items()}
        self._added = dict(added)
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(longest_first)})") if added else None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> GPT2:
        """Restore a tokenizer from ``record``, its ``data_state``.

        Raises KeyError, TypeError, ValueError or AttributeError if the record is damaged.
        """
        vocabulary, added = (
            {str(token): int(number) for token, number in record[name].items()}
            for name in ("vocabulary", "added")
        )
        return cls(vocabulary, [(left, right) for left, right in record["merges"]], added)

    def encode(self, text: bytes) -> Array:
        """Return the token numbers of text. Each byte of invalid UTF-8 becomes a token of its
        own.
        """
        return encoded(
            self._words(text.decode(errors="surrogateescape")), self._tokens_of, self.size
        )

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the text of tokens. Unknown token numbers are left out."""
        return b"".join(self._texts.get(int(token), b"") for token in tokens)

    def _words(self, text: str) -> Iterator[str]:
        for piece in self._cut.split(text) if self._cut else [text]:
            if piece in self._added:
                yield piece
            else:
                for match in _WORDS.finditer(piece.translate(_CLASSES)):
                    yield piece[match.start() : match.end()]

    def _tokens_of(self, word: str) -> list[int]:
        if word in self._added:
            return [self._added[word]]
        return merged(
            [self._bytes[byte] for byte in word.encode(errors="surrogateescape")], self._merges
        )


def _text(token: str) -> bytes:
    """Return the bytes of a token. token: its spelling in ``vocab.json``."""
    return (
        bytes(_BYTE_OF[char] for char in token)
        if all(char in _BYTE_OF for char in token)
        else token.encode()
    )


def load(folder: Path) -> GPT2:
    """Load the tokenizer in a folder: ``tokenizer.json``, or else ``vocab.json`` and
    ``merges.txt``.

    Raises UsageError if the files cannot be read, or do not contain a tokenizer like GPT-2's.
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
            f"--tokenizer: {file}: the token {exc} is missing", code="tokenizer-token-missing"
        ) from exc
    except (ValueError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"--tokenizer: {file} is not a tokenizer like GPT-2's: {exc}", code="tokenizer-not-gpt2"
        ) from exc


def _of_tokenizer_json(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the content of tokenizer.json for ``GPT2.read``. Raises the same errors as
    ``GPT2.read``.
    """
    model = content["model"]
    pre_tokenizer = content["pre_tokenizer"]
    uses_regex = pre_tokenizer.get("use_regex", True)
    normalizer = content.get("normalizer")
    kinds = model["type"], pre_tokenizer["type"], uses_regex, normalizer
    if kinds != ("BPE", "ByteLevel", True, None) or pre_tokenizer.get("add_prefix_space"):
        raise ValueError(
            f"unsupported splitting of text: {pre_tokenizer['type']} and {model['type']}"
        )
    return {
        "vocabulary": model["vocab"],
        "merges": [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]],
        "added": {added["content"]: added["id"] for added in content.get("added_tokens") or ()},
    }
