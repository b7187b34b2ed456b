"""Machines for tests start on a machine that has no base image yet."""

from __future__ import annotations

import json

from tests.support.lab import answer_in


def test_answer_follows_the_reports_of_a_new_base_image() -> None:
    report = {"progress": "building the Debian 12 base (mmdebstrap)"}
    answer = {"network": "", "hosts": []}
    assert answer_in(map(json.dumps, (report, report, answer))) == answer
    assert answer_in([json.dumps(report)]) is None
