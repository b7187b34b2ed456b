"""Write clusterctl/cli/data/messages.json: every code with its messages, the only snapshot of
their wording. `clusterctl explain` reads it. `--uncoded` lists places in the source without a code.

The source is parsed, not run. A code is the argument ``code="…"`` of a call, the literal code of a
``Finding`` or a ``Notice``, or that of an error class for a single condition. The codes for faults
of GPUs, for needs of nodes, for refusals of Google, ssh and sudo, and the names of hints are in data
files.
"""

from __future__ import annotations

import ast
import gc
import itertools
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
FILE: Final = ROOT / "clusterctl" / "cli" / "data" / "messages.json"
FAULTS: Final = ROOT / "clusterctl" / "hosts" / "data" / "nvidia.toml"
REFUSALS: Final = tuple(
    ROOT / "clusterctl" / name
    for name in (
        "providers/gcp/data/diagnoses.yaml",
        "providers/onprem/data/refusals.yaml",
        "transport/data/sudo.yaml",
        "transport/data/tunnels.yaml",
    )
)
HINTS: Final = ROOT / "clusterctl" / "scheduler" / "data" / "hints.yaml"
# Positions of the arguments for code, message, cause and fix.
POSITIONS: Final = {
    "Cause": (None, None, None, None),
    "_Stated": (0, 2, None, 3),
    "_Reason": (0, 2, None, 3),
    "_certain": (0, 1, None, 2),
    "Finding": (2, 3, 4, 5),
    "Failure": (0, 1, None, 4),
    "Notice": (0, 1, None, None),
    "BadValueError": (0, 1, None, None),
    "SpecFault": (0, 2, None, 3),
    "RefusedError": (0, 1, None, 2),
    "ImageProblem": (0, 1, None, 2),
    "Problem": (4, 5, None, 6),
    "SoftwareRefusal": (0, 1, 2, 3),
}
# Error classes for many conditions. Each call passes a code.
BROAD: Final = frozenset(
    "ClusterctlError UsageError NotUpError BundleError MachineError ProvisionError CloudError "
    "TransportError CommandError ConfigureError SchedulerError SlurmError VerifyError "
    "CollectError TransferError PayloadError RankError".split()
)
CODE: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# The placeholder of a value that is filled in at run time.
GAP: Final = "…"
# The most texts for an expression with alternatives, and the longest chain of names that refer to
# names.
_MOST: Final = 6
_DEEPEST: Final = 2


@dataclass(frozen=True)
class Message:
    """A place in the source that reports a condition, with its texts. ``kind``: the class with the
    code.
    """

    code: str
    kind: str
    place: str
    whats: tuple[str, ...]
    whys: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


@dataclass
class _Module:
    """A parsed module, which resolves names to the literals that they may stand for.

    path: relative to the root of the source. fixes: name -> function that returns a fix.
    """

    path: Path
    tree: ast.Module
    nodes: list[ast.AST] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    fixes: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes.append(self.tree)
        # The list grows by the children, so the loop reaches the whole tree.
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                self.nodes.append(child)
        # Other functions return parts of a message, which mean nothing by themselves.
        self.fixes = {
            node.name: node
            for node in self.nodes
            if isinstance(node, ast.FunctionDef) and "fix" in node.name
        }

    def place(self, node: ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    def texts(self, node: ast.expr | None, depth: int = 0) -> tuple[str, ...]:
        """Return the possible texts of an expression, with GAP for each value that is filled in."""
        found: Iterable[str] = ()
        match node:
            case ast.Constant(value=str(text)):
                # A template of str.format.
                found = [re.sub(r"\{\w+\}", GAP, text)]
            case ast.JoinedStr(values=parts):
                found = self._joined(parts, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = self._joined((left, right), depth)
            case ast.FormattedValue(value=ast.Name() as name):
                found = self.texts(name, depth)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
                # Programs for hosts with Python 3.6.
                found = [re.sub(r"\{[^{}]*\}", GAP, text)]
            case ast.Lambda(body=body):
                found = self.texts(body, depth)
            case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, *_, second]):
                found = [*self.texts(first, depth), *self.texts(second, depth)]
            case ast.Call(func=ast.Name(id=name)) if depth < _DEEPEST and name in self.fixes:
                found = (
                    text
                    for each in ast.walk(self.fixes[name])
                    if isinstance(each, ast.Return) and each.value is not None
                    for text in self.texts(each.value, depth + 1)
                )
            case ast.Name(id=name) if depth < _DEEPEST:
                found = (
                    text
                    for value in self._values(node, name)
                    for text in self.texts(value, depth + 1)
                )
        return tuple(itertools.islice(dict.fromkeys(found), _MOST)) or (GAP,)

    def _joined(self, parts: Iterable[ast.expr], depth: int) -> tuple[str, ...]:
        several = itertools.product(*(self.texts(part, depth) for part in parts))
        # Values without a text between them are a single gap.
        return tuple(
            re.sub(f"{GAP}+", GAP, "".join(some)) for some in itertools.islice(several, _MOST)
        )

    def _values(self, node: ast.AST, name: str) -> Iterator[ast.expr]:
        """Yield the values assigned to a name in the function around a node, otherwise in the
        module.
        """
        scope = node
        while (scope := self.parents.get(scope, self.tree)) is not self.tree:
            if isinstance(scope, ast.FunctionDef):
                values = self._reaching(list(_assigned(scope, name)), node)
                if values or name in {
                    arg.arg for arg in (*scope.args.args, *scope.args.kwonlyargs)
                }:
                    yield from values
                    return
        yield from _assigned(self.tree, name)

    def _reaching(self, values: list[ast.expr], node: ast.AST) -> list[ast.expr]:
        """Return the assigned values that may reach a node: the last, and values from other
        branches.
        """
        above = set(self._statements_above(node))
        reaching = []
        before = (value for value in values if value.lineno <= getattr(node, "lineno", 0))
        for value in sorted(before, key=lambda value: value.lineno, reverse=True):
            reaching.append(value)
            if next(self._statements_above(value)) in above:
                break
        return reaching[::-1]

    def _statements_above(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Yield the blocks around a node, from the inside: a statement and the name of its list."""
        while node is not self.tree:
            parent = self.parents[node]
            for name in ("body", "orelse", "finalbody", "handlers"):
                block = getattr(parent, name, None)
                if isinstance(block, list) and node in block:
                    yield parent, name
            node = parent


def _assigned(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield the expressions that a function or a module assigns to a name."""
    nodes = ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ast.iter_child_nodes(scope)
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if (
                target == name
            ):
                yield value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=False)
                yield from (
                    value
                    for target, value in pairs
                    if isinstance(target, ast.Name) and target.id == name
                )


def _called(call: ast.Call) -> str:
    """Return the name of the class that a call instantiates, directly or by ``of_hosts``."""
    match call.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=name), attr="of_hosts"):
            return name
        case ast.Attribute(attr=name):
            return name
    return ""


def modules(root: Path) -> Iterator[_Module]:
    """Parse every module of the package and of the payload below the root of the source."""
    for folder in ("clusterctl", "payload"):
        for path in sorted((root / folder).rglob("*.py")):
            yield _Module(path.relative_to(root), ast.parse(path.read_text(encoding="utf-8")))


def classes_with_codes(every: Iterable[_Module]) -> Mapping[str, tuple[str, str]]:
    """Return code and first line of the docstring of each error class for a single condition."""
    found = {}
    for module in every:
        for node in module.nodes:
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith("Error")
                and node.name not in BROAD
            ):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                for value in (*given, *_assigned(ast.Module(node.body, []), "code")):
                    if isinstance(value, ast.Constant):
                        found[node.name] = (
                            str(value.value),
                            (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " "),
                        )
    return found


@cache
def messages() -> tuple[list[Message], list[str]]:
    """Return all messages with a code, and the places that report something without a code."""
    # All syntax trees are kept. Looking through them for garbage would take half of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return messages_of(modules(ROOT), _from_data())
    finally:
        if was_enabled:
            gc.enable()


def messages_of(
    modules: Iterable[_Module], of_data: Iterable[Message]
) -> tuple[list[Message], list[str]]:
    """Return the messages with a code, and the places in these modules without one.

    of_data: the messages of data files.
    """
    every = list(modules)
    own = classes_with_codes(every)
    found = list(of_data)
    uncoded = []
    for module in every:
        calls = (node for node in module.nodes if isinstance(node, ast.Call))
        for call in sorted(calls, key=lambda call: call.lineno):
            kind = _called(call)
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if not (kind.endswith("Error") or kind in POSITIONS):
                continue
            codes, what, why, fix = _parts(module, call, kind, given)
            if not codes and kind in own:
                codes = (own[kind][0],)
            found += [
                Message(
                    code,
                    kind,
                    module.place(call),
                    *(_texts(module, part) for part in (what, why, fix)),
                )
                for code in codes
            ]
            if not codes and kind in BROAD and not _is_relayed(given):
                uncoded.append(f"{module.place(call)}: {kind}")
    reported = {message.code for message in found}
    found += [
        Message(code, "class", "", (text,)) for code, text in own.values() if code not in reported
    ]
    return found, uncoded


def _is_relayed(given: Mapping[str | None, ast.expr]) -> bool:
    """Return whether a call passes on a code that another place has chosen."""
    return "code" in given or None in given


def _parts(
    module: _Module, call: ast.Call, kind: str, given: Mapping[str | None, ast.expr]
) -> tuple[tuple[str, ...], ast.expr | None, ast.expr | None, ast.expr | None]:
    """Return the codes, the message, the cause and the fix of a call. No codes: it reports
    nothing.
    """
    at_code, at_what, at_why, at_fix = POSITIONS.get(kind, (None, 0, None, None))

    def argument(position: int | None, *names: str) -> ast.expr | None:
        if position is not None and position < len(call.args):
            return call.args[position]
        return next((given[name] for name in names if name in given), None)

    codes = tuple(c for c in module.texts(argument(at_code, "code")) if CODE.fullmatch(c))
    what = argument(at_what, "what", "message", "cause", "text")
    return codes, what, argument(at_why, "why"), argument(at_fix, "fix", "hint")


def _texts(module: _Module, node: ast.expr | None) -> tuple[str, ...]:
    """Return the texts of an argument. Empty if it is only a value."""
    return tuple(text for text in module.texts(node) if text.strip(GAP))


def _from_data() -> Iterator[Message]:
    """Yield the faults of GPUs, the needs of nodes, hints, and the refusals of Google, ssh and
    sudo.
    """
    for file in sorted(ROOT.glob("ansible/roles/*/meta/touches.yml")):
        (touches,) = yaml.safe_load(file.read_text(encoding="utf-8")).values()
        for need in touches.get("needs", ()):
            # The health check of the node has the cause.
            place = str(file.relative_to(ROOT))
            fix = re.sub(r"\{\w+\}", GAP, need["fix"].strip())
            yield Message(need["code"], "Finding", place, (need["what"],), (), (fix,))
    for fault in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["faults"]:
        yield Message(
            fault["code"],
            "fault",
            FAULTS.name,
            (fault["what"],),
            (fault["means"],),
            (fault["fix"],),
        )
    for hint in yaml.safe_load(HINTS.read_text(encoding="utf-8")):
        says, fix = (re.sub(r"\{\w+\}", GAP, hint[name]) for name in ("says", "fix"))
        yield Message(hint["name"], "hint", HINTS.name, (f"usually {says}",), (), (fix,))
    for file in REFUSALS:
        for rule in yaml.safe_load(file.read_text(encoding="utf-8")):
            fixes = (rule["fix"],) if "fix" in rule else ()
            yield Message(rule["code"], "refusal", file.name, (rule["cause"],), (), fixes)


def snapshot(found: Iterable[Message]) -> str:
    """Return the text of messages.json with these messages."""
    by_code: dict[str, list[Message]] = defaultdict(list)
    for message in found:
        by_code[message.code].append(message)
    texts = {
        code: {
            "messages": _distinct(one.whats for one in several),
            "causes": _distinct(one.whys for one in several),
            "fixes": _distinct(one.fixes for one in several),
        }
        for code, several in sorted(by_code.items())
    }
    return json.dumps(texts, indent=1, ensure_ascii=False) + "\n"


def _distinct(texts: Iterable[Iterable[str]]) -> list[str]:
    every = itertools.chain.from_iterable(texts)
    return list(dict.fromkeys(" ".join(text.split()) for text in every))


def printed_texts() -> Mapping[str, list[str]]:
    """Return code -> its messages, as in messages.json."""
    texts = json.loads(FILE.read_text(encoding="utf-8"))
    return {code: each["messages"] for code, each in texts.items()}


def main() -> int:
    if "--uncoded" in sys.argv:
        uncoded = messages()[1]
        print("\n".join([*uncoded, f"{len(uncoded)} places without a code"]))
        return 1 if uncoded else 0
    FILE.write_text(snapshot(messages()[0]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
