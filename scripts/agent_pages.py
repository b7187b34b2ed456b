"""Write the references of skills/clusterctl from docs/, and llms.txt from the manual in README.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SKILL: Final = ROOT / "skills" / "clusterctl"
INDEX: Final = ROOT / "llms.txt"
NOTE: Final = (
    "<!-- Written by scripts/agent_pages.py from {}: `make reference` after a change. -->\n"
)
# Page of docs/ -> the headings of the sections that the skill has, or () for all. The reference has
# the page's name.
SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "cli.md": (
        *("plan", "up", "down", "status", "submit", "replay", "jobs", "wait", "where", "logs"),
        *("cancel", "collect", "runs list", "runs show", "runs diff", "put", "get", "doctor"),
    ),
    "jobs.md": (
        *("Kinds of jobs", "Files that are sent", "Job files", "Sweeps", "Many short tasks"),
        *("Data on the nodes' disks", "Variables", "Modules and builds", "Launching ranks"),
        *("Containers", "Outputs"),
    ),
    "environments.md": (),
    "restarts.md": ("Rules", "The contract", "How often to save"),
    "runs.md": ("Files that are not fetched", "Finding and comparing", "Replay", "The only copy"),
    "howto/attach.md": ("Attach", "Work", "If it fails"),
}
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE: Final = re.compile(r"^```(\w*).*$", re.MULTILINE)


def references() -> dict[Path, str]:
    """Return the file of each reference of the skill, and its text."""
    return {
        SKILL / "references" / Path(page).name: _reference(page, headings)
        for page, headings in SECTIONS.items()
    }


def _reference(page: str, headings: tuple[str, ...]) -> str:
    top, *sections = re.split(r"^(?=## )", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    titled = {section.partition("\n")[0].removeprefix("## "): section for section in sections}
    kept = [titled[heading] for heading in headings] if headings else sections
    title, _, introduction = top.partition("\n")
    introduction = re.sub(r"<!--.*?-->\n*", "", introduction, flags=re.DOTALL)
    text = "".join([f"{title}\n\n", NOTE.format(f"docs/{page}"), introduction, *kept])
    # How a test runs a block means nothing to a reader.
    text = _FENCE.sub(r"```\1", text)
    return _LINK.sub(
        lambda link: _linked(link, set(titled) if not headings else set(headings)), text
    )


def _linked(link: re.Match[str], headings: set[str]) -> str:
    """Return a link that leads somewhere in the skill, or its words alone."""
    target, _, anchor = link[2].partition("#")
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
    if not target:
        return link[0] if anchor in anchors else link[1]
    if re.match(r"[a-z]+:", target):
        return link[0]
    return f"[{link[1]}]({Path(target).name})" if Path(target).name in _names() else link[1]


def _names() -> set[str]:
    return {Path(page).name for page in SECTIONS}


def index() -> str:
    """Return the text of llms.txt: what clusterctl is, and each page of the manual with its first
    sentence. The format is that of llmstxt.org.
    """
    readme = (ROOT / "README.md").read_text()
    summary = readme.split("\n\n")[1]
    manual = readme.partition("## The manual\n")[2]
    return "\n".join(
        [
            "# clusterctl\n",
            *(f"> {line}" for line in summary.splitlines()),
            f"\n{NOTE.format('README.md and docs/')}",
            *_index_of(manual),
        ]
    )


def _index_of(manual: str) -> Iterator[str]:
    for part in re.split(r"(?=\*\*[^*]+\*\*:)", manual)[1:]:
        yield f"## {part.partition('**:')[0].strip('*')}\n"
        for words, page in _LINK.findall(part):
            yield f"- [{words[0].upper()}{words[1:]}]({page}): {_first_sentence(ROOT / page)}"
        yield ""


def _first_sentence(page: Path) -> str:
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    paragraph = next(part for part in text.split("\n\n") if re.match(r"\s*[\w`*\[]", part))
    plain = _LINK.sub(r"\1", " ".join(paragraph.replace("**", "").split()))
    return re.split(r"(?<=\.) (?=[A-Z`])", plain)[0]


def main() -> int:
    """Write the files."""
    (SKILL / "references").mkdir(exist_ok=True)
    for file, text in {**references(), INDEX: index()}.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
