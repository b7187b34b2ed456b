"""Keep figures of the source from rising: long functions, callbacks, inner imports, vague prose and names.

Without options, as in `make lint`, compare each figure with scripts/figures.json and fail if any is higher.
`--list callback` lists the places that the figures with this name count, `--record` records lower figures. To
let a figure rise, edit the file, and explain it in the commit.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import itertools
import json
import math
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "scripts" / "figures.json"
WORDS = ROOT / "scripts" / "words.toml"
SHOW = "python scripts/figures.py"
# The most places that are shown without --list.
FEW = 20

LONG_FUNCTION, LONG_FILE, SHORT_FILE, PROSE_WORDS = 50, 500, 80, 4
TEST_NAME = 60
# The longest comment at a line's end, including the #.
UNIT_WORDS = 4
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TEXTS = {".py", ".md", ".yml", ".yaml", ".toml", ".j2", ".tf", ".sh"}
# Names that do not describe their value.
VAGUE = {"one", "found", "said", "known", "there", "wanted", "what", "why"}
# The files and folders that may contain no word of WORDS.
SPOKEN = {"README.md", "docs", "clusterctl", "payload", "ansible", "templates", "terraform", "examples"}
CALLBACK = re.compile(r"Callable|Reporter|Progress\b|Prompts")
PROVIDER = re.compile(r"""provider\.type|\.provider\b.{0,12}(==|in \()|["'](local|onprem|gcp)["']""")
# Not names in backquotes, nor the value None.
WHO = re.compile(r"(?<!`)\b(what|whatever|whose|whom|who)\b", re.IGNORECASE)
ONE = re.compile(
    r"(?<!`)\b([Oo]nes?|none|[Oo]thers|[Nn]obody|[Ss]omebody)\b"
    r"(?! of the| node| host| job| file| rank| run| line| word)"
)


@dataclass(frozen=True)
class Source:
    """A file of the project: its path from the root, and its text."""

    path: Path
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of a module's syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        """The comments of a module that are no instructions to a linter."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = (token for token in tokens if token.type == tokenize.COMMENT)
        return [token for token in comments if not re.match(r"# ?(noqa|type:|pragma|!)", token.string)]

    @cached_property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    def place(self, line: int, text: str = "") -> str:
        return f"{self.path}:{line}: {text or self.lines[line - 1].strip()}"


@dataclass(frozen=True)
class Figure:
    """A number, and the places that it counts. It is recorded as the next multiple of its step."""

    value: float
    places: list[str]
    step: float = 1

    @property
    def to_record(self) -> float:
        return math.ceil(self.value / self.step) * self.step


def sources() -> list[Source]:
    """Read the files of the project that git does not ignore."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(argv, text=True, cwd=ROOT).split("\0")
    paths = [Path(name) for name in sorted({*names}) if name and (ROOT / name).is_file()]
    read = [path for path in paths if path.suffix in TEXTS or path.parts[0] == "ansible"]
    return [Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in read]


def figures(files: Iterable[Source]) -> dict[str, Figure]:
    """Compute all figures."""
    files = list(files)
    python: dict[str, list[Source]] = defaultdict(list)
    for file in files:
        if file.path.suffix == ".py":
            python[file.path.parts[0]].append(file)
    core, payload, tests = python["clusterctl"], python["payload"], python["tests"]
    support = [file for file in tests if "support" in file.path.parts[1] or file.path.name == "conftest.py"]
    prose = [file for file in files if file.path.parts[0] in {"clusterctl", "payload", "ansible", "docs"}]
    return {
        **_structure(core),
        **_prose(
            [*prose, *(file for file in files if file.path.name == "README.md" and len(file.path.parts) == 1)]
        ),
        f"names of tests over {TEST_NAME} characters": _count(
            file.place(node.lineno, node.name)
            for file in tests
            for node in file.nodes
            if isinstance(node, FUNCTIONS) and node.name.startswith("test_") and len(node.name) > TEST_NAME
        ),
        "assertions on prose": _count(_prose_assertions(tests)),
        "words of our own": _count(_own_words(files)),
        "lines of clusterctl": _lines(core),
        "lines of payload": _lines(payload),
        "lines of ansible": _lines(file for file in files if file.path.parts[0] == "ansible"),
        "lines of tests": _lines(tests),
        "lines of tests/support": _lines(support),
    }


def _count(places: Iterable[str]) -> Figure:
    places = list(places)
    return Figure(len(places), places)


def _lines(files: Iterable[Source]) -> Figure:
    files = sorted(files, key=lambda file: -len(file.lines))
    # A small change, such as a new test, stays below the next multiple.
    return Figure(sum(len(f.lines) for f in files), [f"{len(f.lines):5} {f.path}" for f in files], step=250)


def _structure(files: list[Source]) -> dict[str, Figure]:
    """Compute the figures about the structure of a package's code."""
    functions = sorted(
        ((node.end_lineno or 0) - node.lineno + 1, file.place(node.lineno, node.name))
        for file in files
        for node in file.nodes
        if isinstance(node, FUNCTIONS)
    )
    long = [f"{lines:4} {place}" for lines, place in reversed(functions) if lines > LONG_FUNCTION]
    importers = _importers(files)
    return {
        f"functions over {LONG_FUNCTION} lines": _count(long),
        "length of the longest function": Figure(functions[-1][0] if functions else 0, long[:1]),
        "functions with a callback": _count(_with_callback(files)),
        "imports inside functions": _count(_inner_imports(files)),
        "mutual imports": _count(
            f"{one} and {other}"
            for one, other in itertools.combinations(sorted(importers), 2)
            if one in importers[other] and other in importers[one]
        ),
        f"files over {LONG_FILE} lines": _count(
            f"{len(file.lines):4} {file.path}" for file in files if len(file.lines) > LONG_FILE
        ),
        f"files under {SHORT_FILE} lines with one importer": _count(
            str(file.path)
            for file in files
            if len(file.lines) < SHORT_FILE
            and not file.path.name.startswith("__")
            and len(importers[file.module]) <= 1
        ),
        "files that may ask for the provider": _count(
            str(file.path)
            for file in files
            if file.path.parts[1] not in {"providers", "spec"} and PROVIDER.search(file.text)
        ),
    }


def _importers(files: list[Source]) -> Mapping[str, set[str]]:
    """Return the modules that import each module."""
    importers: dict[str, set[str]] = {file.module: set() for file in files}
    for file in files:
        for node in file.nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = (f"{node.module}.{alias.name}" for alias in node.names)
                names = [name if name in importers else node.module for name in full]
            for name in {*names} & importers.keys() - {file.module}:
                importers[name].add(file.module)
    return importers


def _with_callback(files: list[Source]) -> Iterator[str]:
    for file in files:
        for node in file.nodes:
            if isinstance(node, FUNCTIONS):
                parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                annotations = (ast.unparse(one.annotation) for one in parameters if one.annotation)
                if any(map(CALLBACK.search, annotations)):
                    yield file.place(node.lineno, node.name)


def _inner_imports(files: list[Source]) -> Iterator[str]:
    for file in files:
        functions = (node for node in file.nodes if isinstance(node, FUNCTIONS))
        inner = itertools.chain.from_iterable(map(ast.walk, functions))
        lines = {node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom)}
        yield from map(file.place, sorted(lines))


def _prose(files: list[Source]) -> dict[str, Figure]:
    """Compute the figures about vague pronouns, vague names and comments at a line's end, by folder."""
    lines = [(file, *line) for file in files for line in _prose_lines(file)]
    by_folder: dict[str, list[str]] = defaultdict(list)
    result: dict[str, Figure] = {}
    for name, pattern in (("what, who, whose", WHO), ("one, none, others", ONE)):
        hits = [
            (file, file.place(line, text.strip()))
            for file, line, text in lines
            for _ in pattern.finditer(text)
        ]
        for tree in ("clusterctl", "payload", "ansible", "docs"):
            words = sum(
                len(re.findall(r"[A-Za-z']+", text)) for file, _, text in lines if _tree(file) == tree
            )
            places = [place for file, place in hits if _tree(file) == tree]
            result[f"{name} per 1,000 words of {tree}"] = Figure(
                1000 * len(places) / max(words, 1), places, 0.1
            )
        for file, place in hits:
            by_folder[f"{name} in {_folder(file)}"].append(place)
    for file in files:
        if file.path.suffix == ".py":
            by_folder[f"vague names in {_folder(file)}"] += _vague_names(file)
            by_folder[f"comments at a line's end in {_folder(file)}"] += _trailing_comments(file)
    return result | {name: _count(by_folder[name]) for name in sorted(by_folder)}


def _tree(file: Source) -> str:
    return file.path.parts[0] if len(file.path.parts) > 1 else "docs"


def _folder(file: Source) -> str:
    tree, *inner, _ = (_tree(file), *file.path.parts[1:-1], file.path.name)
    return f"{tree}/{inner[0]}" if inner and tree in {"clusterctl", "payload"} else tree


def _prose_lines(file: Source) -> Iterator[tuple[int, str]]:
    """Yield line number and text of docstrings, comments, names of Ansible tasks, and pages without code."""
    if file.path.suffix == ".md":
        text = re.sub(
            r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), file.text, flags=re.DOTALL | re.MULTILINE
        )
        yield from enumerate(re.sub(r"`[^`\n]*`", "", text).splitlines(), 1)
    elif file.path.suffix != ".py":
        for number, line in enumerate(file.lines, 1):
            if prose := re.search(r"(?:^|\s)#+ (.*)|\b(?:name|description|short_description): (.*)", line):
                yield number, prose[1] or prose[2]
    else:
        for node in file.nodes:
            match node:
                case (
                    ast.Module(body=[ast.Expr(value=ast.Constant(value=str(text)) as docstring), *_])
                    | ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str(text)) as docstring), *_])
                    | ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str(text)) as docstring), *_])
                ):
                    yield from enumerate(text.splitlines(), docstring.lineno)
        for token in file.comments:
            yield token.start[0], token.string


def _vague_names(file: Source) -> Iterator[str]:
    for node in file.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE:
                yield file.place(node.lineno)


def _trailing_comments(file: Source) -> Iterator[str]:
    """Yield the comments behind code that are longer than a unit or a shape."""
    for token in file.comments:
        is_shape = token.string.startswith(("# [", "# ("))
        if token.line[: token.start[1]].strip() and not is_shape and len(token.string.split()) > UNIT_WORDS:
            yield file.place(token.start[0])


def _prose_assertions(files: list[Source]) -> Iterator[str]:
    """Yield the assertions that contain several words of a message, or match an error's message."""
    for file in files:
        for node in file.nodes:
            match node:
                case ast.keyword(arg="match"):
                    yield file.place(node.lineno)
                case ast.Assert(test=expression) if any(map(_is_prose, _texts(expression))):
                    yield file.place(node.lineno)


def _texts(expression: ast.expr) -> Iterator[str]:
    for node in ast.walk(expression):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=values):
                yield "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in values)


def _is_prose(text: str) -> bool:
    return len(text.split()) >= PROSE_WORDS and re.search("[a-z]{2,} [a-z]{2,}", text) is not None


def _own_words(files: list[Source]) -> Iterator[str]:
    """Yield the words that have an established term, with that term."""
    table = tomllib.loads(WORDS.read_text())
    words, names = table["words"], table["names"]
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(map(re.escape, words))})(?![A-Za-z])", re.IGNORECASE)
    for file in files:
        if file.path.parts[0] not in SPOKEN or file.path.suffix not in TEXTS:
            continue
        for number, line in enumerate(file.lines, 1):
            for found in pattern.finditer(line):
                yield file.place(number, f"{found[1]}: write {words[found[1].lower()]}")
        if file.path.suffix == ".py":
            for number, name in [(1, file.path.stem), *_public_names(file)]:
                if name.lower() in names:
                    yield file.place(number, f"{name}: write {names[name.lower()]}")


def _public_names(file: Source) -> Iterator[tuple[int, str]]:
    for node in file.nodes:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield node.lineno, name


def compare(found: Mapping[str, Figure], recorded: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return lines about figures that are higher than recorded, and about figures that are lower."""
    higher, lower = [], []
    for name, figure in found.items():
        limit = recorded.get(name, 0)
        if figure.value > limit:
            higher.append(f'{name}: {figure.value:g}, recorded {limit:g}; the places: {SHOW} --list "{name}"')
            higher += [f"    {place}" for place in figure.places if len(figure.places) <= FEW]
        elif figure.to_record < limit:
            lower.append(f"{name}: {figure.value:g}, recorded {limit:g}; to keep it: {SHOW} --record")
    return higher, lower


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", metavar="FIGURE", help="show the places that a figure counts")
    parser.add_argument("--record", action="store_true", help="record the figures that are lower")
    options = parser.parse_args()
    # All syntax trees are kept, and looking through them for garbage takes 3 of 8 seconds.
    gc.disable()
    found = figures(sources())
    if options.list:
        chosen = {name: figure for name, figure in found.items() if options.list in name}
        for name, figure in chosen.items():
            print(f"{name}: {figure.value:g}", *figure.places, sep="\n")
        return 0 if chosen else f"no such figure; the figures are: {'; '.join(found)}"
    recorded: dict[str, float] = json.loads(RECORD.read_text())
    if options.record:
        recorded = {name: min(one.to_record, recorded.get(name, math.inf)) for name, one in found.items()}
        RECORD.write_text(json.dumps(recorded, indent=0) + "\n")
    higher, lower = compare(found, recorded)
    print(*higher, *lower, sep="\n", end="\n" if higher or lower else "")
    return 1 if higher else 0


if __name__ == "__main__":
    sys.exit(main())
