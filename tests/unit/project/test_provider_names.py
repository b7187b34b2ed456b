"""Outside `providers/` and `spec/` no code asks for a provider's name. The imports are held by
contracts of import-linter; it can't see a comparison with a text, so this test reads the code.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from clusterctl.providers.registry import provider_of
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.load import parse_spec, starter_spec
from clusterctl.spec.models import PROVIDERS

PACKAGE = Path(__file__).parents[3] / "clusterctl"
QUESTION = re.compile(rf"(?:[!=]=|\bin\b|\bcase\b)[^\n#]*[\"'](?:{'|'.join(PROVIDERS)})[\"']")
# The kind of a shared folder may be `existing`.
OTHER = re.compile(r"\.kind\b")


def questions(text: str) -> list[str]:
    return [line for line in text.splitlines() if QUESTION.search(line) and not OTHER.search(line)]


def test_module_outside_providers_never_asks_for_a_name() -> None:
    paths = (path for path in PACKAGE.rglob("*.py") if "_assets" not in path.parts)
    outside = [
        path for path in paths if path.relative_to(PACKAGE).parts[0] not in {"providers", "spec"}
    ]
    assert len(outside) > 100
    found = {str(path): lines for path in outside if (lines := questions(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("if spec.provider.type == 'gcp': pass", True),
        ('limit = chosen if inventory.provider in ("onprem", "local") else ()', True),
        ('        case "local":', True),
        ("if spec.provider.adopts_hosts: pass", False),
        ("if provider != spec.provider.type: pass", False),
        ('is_mounted = inventory.shared_folder.kind != "existing"', False),
        ("provider = 'local'", False),
    ],
)
def test_questions_finds_each_way_to_ask(line: str, *, asks: bool) -> None:
    assert bool(questions(line)) is asks


DOCSTRING_AFTER = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
# What a provider's tool, file or login service is called, in code outside comments.
SERVICE = re.compile(r"terraform|tfstate|google|gcloud|os.?login", re.IGNORECASE)
# Modules that may name them: the forms of secrets, the errors of ssh's programs, and the options of
# a project's name.
NAMING = {
    "cli/down.py",
    "cli/verbs.py",
    "cluster/storage.py",
    "errors.py",
    "state/workspace.py",
    "transport/refusals.py",
    "util/redact.py",
    "util/secret_forms.py",
}


def services(text: str) -> list[str]:
    """Return the names and texts in code, without comments and docstrings, that name a service."""
    words = []
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and before in DOCSTRING_AFTER
        if token.type in {tokenize.NAME, tokenize.STRING} and not is_docstring:
            words += [token.string] if SERVICE.search(token.string) else []
        if token.type not in {tokenize.COMMENT, tokenize.NL}:
            before = token.type
    return words


def test_only_named_modules_outside_providers_know_a_service_of_one() -> None:
    paths = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
    outside = {
        str(name): path.read_text()
        for name, path in paths.items()
        if name.parts[0] not in {"providers", "spec", "_assets"}
    }
    assert {name for name, text in outside.items() if services(text)} == NAMING


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('for folder in state_home().glob("[!.]*/terraform"): pass', True),
        ("created = workspace.terraform.is_dir()", True),
        ('_AT_GOOGLE = frozenset({"bucket"})', True),
        ('fix = "see docs/gcp.md, OS Login"', True),
        ("# Google needs a letter.", False),
        ('"""Return what Terraform made."""', False),
        ("is_new = bool(traits.late_account_fix)", False),
    ],
)
def test_services_finds_each_way_to_name_one(line: str, *, names: bool) -> None:
    assert bool(services(line + "\n")) is names


def test_provider_folder_belongs_to_a_registered_provider() -> None:
    folders = {path.parent.name for path in (PACKAGE / "providers").glob("*/provider.py")}
    assert folders == {*PROVIDERS}


@pytest.mark.parametrize("name", PROVIDERS)
def test_registry_creates_each_provider_with_its_settings(name: str) -> None:
    settings = parse_spec(starter_spec(name), "spec").provider
    provider = provider_of(settings)
    assert type(provider).__module__ == f"clusterctl.providers.{name}.provider"
    assert provider._settings == settings


@pytest.mark.parametrize("name", PROVIDERS)
def test_provider_declares_each_trait_of_its_settings(name: str) -> None:
    declared = vars(PROVIDERS[name])
    assert {*ProviderSettings.__class_vars__} - {*declared} == set()


@pytest.mark.parametrize("name", PROVIDERS)
def test_provider_declares_whether_single_hosts_can_change(name: str) -> None:
    provider = type(provider_of(parse_spec(starter_spec(name), "spec").provider))
    assert {"takes_single_hosts", "recreates_hosts"} - {*vars(provider)} == set()


@pytest.mark.parametrize("name", PROVIDERS)
def test_manual_has_a_page_about_each_provider(name: str) -> None:
    docs = PACKAGE.parent / "docs"
    # The generated page names each provider without explaining it.
    pages = [path for path in docs.rglob("*.md") if path.name != "spec.md"]
    assert any(re.search(rf"type: {name}\b", page.read_text()) for page in pages)
