"""run.json of a collected run, as it is read again."""

import json
from pathlib import Path

from clusterctl.errors import CollectError
from clusterctl.state.run_record import RunRecord
from tests.support.messages import refused


def test_read_names_the_key_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"token": "a", "final": "perhaps"}))
    with refused("not-a-run", CollectError, where=str(tmp_path / "run.json")) as caught:
        RunRecord.load(tmp_path)
    assert caught.value.why.partition(": ")[0] in RunRecord.model_fields


def test_read_of_invalid_json_names_the_position(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"id": ')
    with refused("not-a-run", CollectError, "line 1"):
        RunRecord.load(tmp_path)
