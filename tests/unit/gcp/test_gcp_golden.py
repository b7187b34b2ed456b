"""The plan of some specs: golden files, what must hold of each, and that nothing is left once it is applied.

UPDATE_GOLDEN=1 writes the files anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.provider import variables
from clusterctl.spec import gcp
from tests.support.google.module import CLUSTER_ID, NAMES, PUBLIC_KEY, spec_of
from tests.support.sweeps import in_sweep
from tests.unit.gcp.many import Edit, copies, planned
from tests.unit.gcp.policy import findings

pytestmark = pytest.mark.platform("rendered", "google-terraform")

GOLDEN = Path(__file__).with_name("golden")
# Said once for all: they follow from others, or say the same of every resource.
LEFT_OUT = frozenset({"effective_labels", "terraform_labels", "project", "metadata"})
Resources = Mapping[str, Mapping[str, Any]]


def asked(*names: str) -> dict[str, dict[str, Any]]:
    """The variables of these specs, by name."""
    return {name: variables(spec_of(name), CLUSTER_ID, PUBLIC_KEY) for name in names}


def test_the_plan_of_each_spec_is_its_golden_file_and_keeps_every_promise(tmp_path: Path) -> None:
    plan = copies(tmp_path, asked(*NAMES)).planned()
    wrong = []
    for name in NAMES:
        resources = planned(plan, name)
        wrong += [
            f"{name}: {each}" for each in findings(resources, kms_key=gcp.settings_of(spec_of(name)).kms_key)
        ]
        path, text = GOLDEN / f"{name}.txt", rendered(resources)
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text)
        wrong += unified_diff(
            path.read_text().splitlines(), text.splitlines(), str(path), "planned", lineterm=""
        )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("names", [("a100", "filestore", "kept"), *in_sweep((NAMES,))], ids=len)
def test_what_google_shows_otherwise_than_it_was_sent_is_no_change(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Links in full, images of families, disks in another order, what machine types bring, capitals."""
    planted = asked("h100")["h100"] | {"project": "another-project"}
    mistake = Edit("modules/instance/main.tf", "      scratch_disk,\n", "")
    module = copies(tmp_path, asked(*names) | {"planted": planted}, {"planted": mistake})
    module.apply()
    shown = module.cloud.instances["big-train-1"]
    assert shown["network_interface"][0]["subnetwork"].startswith("https://")
    assert shown["guest_accelerator"][0]["type"].endswith("/acceleratorTypes/nvidia-tesla-a100")
    assert shown["boot_disk"][0]["initialize_params"][0]["image"].endswith("-v20261101")
    assert [each["device_name"] for each in shown["attached_disk"]] == ["extra-1", "extra-0"]
    left = module.plan()
    assert {address for address in left if not address.startswith("module.planted.")} == set()
    assert set(map(tuple, left.values())) == {("delete", "create")}, "its machines bring local SSDs"


def rendered(resources: Resources) -> str:
    """The resources as text that is easy to compare: a line an attribute, equal nodes said once."""
    first: dict[str, str] = {}
    blocks = []
    for address, values in resources.items():
        body = "".join(_lines(_short(values), "  "))
        node = next((part for part in address.split('"') if part.rpartition("-")[2].isdigit()), None)
        pattern = f"{address}\n{body}".replace(node, "NODE") if node else address
        like = first.setdefault(pattern, node or "")
        blocks.append(f"{address}\n{body}" if like == (node or "") else f"{address}: as {like}\n")
    return "\n".join(blocks)


def _short(value: Any) -> Any:
    """Without what is not said, and what is said of every resource."""
    if isinstance(value, Mapping):
        short = {key: _short(each) for key, each in value.items() if key not in LEFT_OUT}
        return {key: each for key, each in short.items() if each not in (None, [], {}, "")}
    return [_short(each) for each in value] if isinstance(value, list) else value


def _lines(value: Any, indent: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{indent}{value}\n"]
    lines = []
    for key, each in sorted(value.items()):
        inner = each[0] if isinstance(each, list) and len(each) == 1 else each
        if isinstance(inner, Mapping):
            lines += [f"{indent}{key}:\n", *_lines(inner, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {inner}\n")
    return lines


def test_equal_nodes_are_shown_once_and_others_in_full() -> None:
    def nodes(second: str) -> str:
        kinds = {"x-train-1": "n1-standard-4", "x-train-2": second}
        return rendered({f'm.node["{n}"].r': {"name": n, "machine_type": kind} for n, kind in kinds.items()})

    assert 'm.node["x-train-2"].r: as x-train-1' in nodes("n1-standard-4")
    assert "machine_type: n1-standard-8" in nodes("n1-standard-8")
