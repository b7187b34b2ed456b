"""The kinds of file that users write: a cluster's spec, a job file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from clusterctl.spec.finding import Finding

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Kind(Generic[M]):
    """``name`` is what messages call it, ``words`` say what each pattern of its model asks for.

    ``findings`` tells what does not hold between the fields of plain values. Below the keys ``as_text``,
    numbers and booleans are text. ``missing`` helps who has no such file, ``empty`` who has nothing in it.
    """

    name: str
    model: type[M]
    words: Mapping[str, str]
    findings: Callable[[Mapping[str, object]], Iterable[Finding]]
    missing: str
    empty: str
    as_text: frozenset[str] = frozenset()
