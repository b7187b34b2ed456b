"""Logs in which words resemble an error that did not end the program: data/logs.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.ends.diagnose import diagnose
from clusterctl.scheduler.ends.facts import Evidence, Facts
from clusterctl.util.assets import read_table
from tests.unit.scheduler.test_diagnosis import JOB

ENDED = "epoch 7: loss 0.31\nvalidation failed: accuracy 0.1 is below 0.5"
EPOCHS = "\n".join(f"epoch {number}: loss {1 / (number + 1):.3f}" for number in range(60))
LOGS = read_table(Path(__file__).with_name("data") / "logs.yaml", tuple[dict[str, Any], ...])
# What the headline says of a log's line.
QUOTES = ("last exception", "last line")
# Messages around those of a program.
SURROUNDING = ("srun: ", "slurmstepd", "-----", "+---", "clusterctl: ", "[n1:")

# The codes of ends of which nobody states the cause.
NOT_STATED = {"python-exception", "signal", "exit-code", "unknown"}


@pytest.mark.parametrize("case", LOGS, ids=range(len(LOGS)))
def test_last_line_is_shown_and_the_headline_names_no_more_than_the_facts(
    case: Mapping[str, Any],
) -> None:
    log = case["log"].replace("{EPOCHS}", EPOCHS).replace("{ENDED}", ENDED)
    job = replace(JOB, nodes=("n1",), exit_code=case["exit_code"], signal=case.get("signal", 0))
    evidence = Evidence(job=job, log=log, script=case.get("script", ""))
    found, facts = diagnose(evidence), Facts.of(evidence)
    end, *quotes = found.cause.split("; last ")
    assert found.code in NOT_STATED, found
    assert end == f"{facts.end}{facts.at}"
    assert all(f"last {quote}".startswith(QUOTES) for quote in quotes)
    written = [line for line in log.split("\n") if line.strip()]
    own = [line for line in written if not line.lstrip(" ").startswith(SURROUNDING)] or written
    assert own[-1].strip()[:50] in "\n".join(found.lines), found
