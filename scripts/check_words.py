"""Finds words of our own making where the field has a term: in names, messages, comments and pages.

`WORDS` may stand nowhere. `NAMES` are common English words, so only a public name (a module, function, class,
argument or field) must not be one of them. Both say what to write instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = {
    "astray": "drifted",
    "at_once": "parallel map",
    "blame": "diagnosis",
    "brought_packages": "role packages",
    "carry_out": "apply",
    "foresee": "preview",
    "foreseen": "preview",
    "foretold": "check mode",
    "give_back": "release",
    "left_behind": "pending release",
    "mend": "converge",
    "mended": "converged",
    "mending": "convergence",
    "mends": "converges",
    "mortal": "process lifetime",
    "no_hands": "Prompts",
    "outfit": "NodeConfig",
    "outlook": "preview",
    "reaper": "subreaper",
    "sick": "unhealthy",
    "telling": "progress",
    "way_in": "login",
    "without a route out": "air-gapped",
}
NAMES = {
    "apart": "unshared_nodes",
    "boost": "loss_scale",
    "hands": "Prompts",
    "harm": "AffectedJob",
    "house": "wheelhouse",
    "judged": "evaluate",
    "learned": "data_state",
    "news": "pending_changes",
    "noted": "warning",
    "opening": "datasets",
    "passing": "transient",
    "pieces": "shards",
    "question": "ProbeRequest",
    "say": "progress",
    "shares": "probs",
    "spent": "had_side_effects",
    "sums": "grad_buffer",
    "taken": "already_exists",
    "tell": "progress",
    "touched": "role_files",
    "votes": "flags",
    "weigh": "evaluate",
}
PLACES = ("README.md", "docs", "clusterctl", "payload", "ansible", "templates", "terraform", "examples")
TEXTS = {".py", ".md", ".yml", ".yaml", ".toml", ".j2", ".tf", ".sh"}
_WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(map(re.escape, WORDS))})(?![A-Za-z])", re.IGNORECASE)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The public names that a module defines, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield node.lineno, name


def findings(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word and what to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _WORD.finditer(line):
            yield number, found[1], WORDS[found[1].lower()]
    if path.suffix == ".py":
        for number, name in [(1, path.stem), *names(ast.parse(text))]:
            if (instead := NAMES.get(name.lower())) and not name.startswith("_"):
                yield number, name, instead


def main() -> int:
    tracked = subprocess.check_output(["git", "ls-files", *PLACES], text=True, cwd=ROOT).split("\n")
    count = 0
    for path in (ROOT / name for name in tracked if Path(name).suffix in TEXTS):
        if path.exists():
            for number, word, instead in findings(path, path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{number}: {word}: write {instead}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
