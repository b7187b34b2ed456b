"""The command explain: the meaning of the codes of errors, findings, hints and notes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError
from clusterctl.spec.names import did_you_mean

_DATA: Final = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Explanation:
    """The meaning of a code.

    messages, causes, fixes: the texts of all places that report it, with `…` for values.
    more: facts that its messages leave out. Default: "".
    """

    code: str
    messages: list[str]
    causes: list[str]
    fixes: list[str]
    more: str = ""


def explain(
    screen: Screen,
    code: Annotated[str | None, argument("A code, such as host-key.", metavar="CODE")] = None,
) -> None:
    """Explain the code of an error, a finding, a hint or a note.

    Without CODE: list all codes. In the texts, `…` stands for a value.
    """
    known = explanations()
    if code is not None and code not in known:
        raise UsageError(
            f"there is no code {code!r}",
            code="unknown-code",
            fix=did_you_mean(code, known) or "`clusterctl explain` lists all codes",
        )
    chosen = [known[code]] if code else list(known.values())
    rows = [[each.code, each.messages[0] if each.messages else "-"] for each in chosen]
    lines = _page(known[code]) if code else screen.table(["CODE", "MESSAGE"], rows)
    screen.result({"codes": [asdict(each) for each in chosen]}, *lines)


def explanations() -> Mapping[str, Explanation]:
    """Return code -> its explanation, sorted by code."""
    texts = json.loads((_DATA / "messages.json").read_text(encoding="utf-8"))
    more = tomllib.loads((_DATA / "explanations.toml").read_text(encoding="utf-8"))
    return {code: Explanation(code, **texts[code], more=more.get(code, "")) for code in texts}


def _page(explanation: Explanation) -> Iterator[str]:
    yield explanation.code
    for title, texts in (
        ("message", explanation.messages),
        ("cause", explanation.causes),
        ("what to do", explanation.fixes),
    ):
        if texts:
            yield f"  {title}:"
            yield from (f"    {text}" for text in texts)
    if explanation.more:
        yield ""
        yield from explanation.more.strip().splitlines()
