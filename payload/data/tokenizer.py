"""Tokenizers: bytes, or byte pairs learned from the text, merged within words as in GPT-2.

Byte-pair encoding: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units",
2016.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from payload.device.base import Array
from payload.node.heartbeat import beat

Merge = tuple[int, int]
W = TypeVar("W", bytes, str)

_BYTES = 256
_WORDS = re.compile(
    rb" ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9_ \t-\r]+|[ \t-\r]+(?=[ \t-\r])|[ \t-\r]+|_"
)
"""Matches a word, a number or punctuation, each with a blank before it, or other white space.
Characters outside ASCII are punctuation.
"""


class Tokenizer(Protocol):
    """Converts text to token numbers. Every byte has a token, so any text can be encoded."""

    kind: str
    """``bytes``, ``bpe`` or ``gpt2``."""
    name: str
    size: int
    """Number of tokens."""
    data_state: Mapping[str, Any]
    """The learned state, for JSON."""

    def encode(self, text: bytes) -> Array:
        """Return the token numbers of text, in the smallest unsigned dtype that holds every
        number.
        """

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the text of tokens. A token may be a part of a UTF-8 character."""


class Bytes:
    """A tokenizer with a token per byte."""

    kind = name = "bytes"
    size = _BYTES
    data_state: Mapping[str, Any] = MappingProxyType({})

    def encode(self, text: bytes) -> Array:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Iterable[int]) -> bytes:
        return bytes(tokens)


class BytePairs:
    """A tokenizer of byte pairs: each merge adds a token that stands for two adjacent tokens."""

    kind = "bpe"

    def __init__(self, merges: Sequence[Merge]) -> None:
        self.merges = tuple(merges)
        self.size = _BYTES + len(self.merges)
        self.name = f"bpe:{self.size}"
        self.data_state: Mapping[str, Any] = {"merges": self.merges}
        self._merges = {pair: (rank, _BYTES + rank) for rank, pair in enumerate(self.merges)}
        self._texts = [bytes([value]) for value in range(_BYTES)]
        for left, right in self.merges:
            if not 0 <= min(left, right) <= max(left, right) < len(self._texts):
                raise ValueError(f"a merge of {left} and {right}, which are not tokens yet")
            self._texts.append(self._texts[left] + self._texts[right])

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> BytePairs:
        """Restore a tokenizer from ``record``, its ``data_state``.

        Raises KeyError, TypeError or ValueError if the record is damaged.
        """
        return cls([(int(left), int(right)) for left, right in record["merges"]])

    def encode(self, text: bytes) -> Array:
        return encoded(_WORDS.findall(text), lambda word: merged([*word], self._merges), self.size)

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self._texts[token] for token in tokens)


def encoded(words: Iterable[W], tokens_of: Callable[[W], Sequence[int]], size: int) -> Array:
    """Return the tokens of all words. Calls ``tokens_of`` once per distinct word. size: vocabulary
    size.
    """
    dtype = np.min_scalar_type(size - 1)
    tokens_by_word: dict[W, Array] = {}
    parts = []
    for word in words:
        if word not in tokens_by_word:
            beat()
            tokens_by_word[word] = np.array(tokens_of(word), dtype)
        parts.append(tokens_by_word[word])
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def merged(tokens: list[int], merges: Mapping[Merge, tuple[int, int]]) -> list[int]:
    """Merge adjacent tokens, in the order of ``merges``, until no pair can be merged.

    merges: for each pair, its position in the order and the resulting token.
    """
    last = len(merges), -1
    while len(tokens) > 1:
        pair = min(pairwise(tokens), key=lambda pair: merges.get(pair, last))
        if pair not in merges:
            break
        tokens = replace(tokens, pair, merges[pair][1])
    return tokens


def learn(text: bytes, size: int) -> BytePairs:
    """Learn a tokenizer of ``size`` tokens: merge the most frequent pair (on a tie, the smallest)
    repeatedly.

    The result has fewer tokens if no pair occurs twice. Each merge recounts only the words that it
    changes.
    """
    words = [(list(word), count) for word, count in sorted(Counter(_WORDS.findall(text)).items())]
    pairs: Counter[Merge] = Counter()
    words_with: defaultdict[Merge, set[int]] = defaultdict(set)
    for index, (word, count) in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += count
            words_with[pair].add(index)
    merges: list[Merge] = []
    # The most frequent pair is first. Entries with outdated counts are skipped.
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while _BYTES + len(merges) < size and heap:
        beat()
        count, best = heapq.heappop(heap)
        if -count != pairs[best]:
            continue
        if -count < 2:  # noqa: PLR2004
            break
        changed: set[Merge] = set()
        for index in words_with.pop(best):
            word, count = words[index]
            for pair in pairwise(word):
                pairs[pair] -= count
                changed.add(pair)
            word = replace(word, best, _BYTES + len(merges))
            words[index] = word, count
            for pair in pairwise(word):
                pairs[pair] += count
                changed.add(pair)
                words_with[pair].add(index)
        merges.append(best)
        for pair in changed - {best}:
            heapq.heappush(heap, (-pairs[pair], pair))
    return BytePairs(merges)


def replace(word: list[int], pair: Merge, token: int) -> list[int]:
    """Replace each occurrence of a pair by a token, from left to right."""
    result: list[int] = []
    for number in word:
        # The new token is never a part of the pair, because the pair's tokens are older.
        if result and (result[-1], number) == pair:
            result[-1] = token
        else:
            result.append(number)
    return result
