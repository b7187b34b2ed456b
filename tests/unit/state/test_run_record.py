"""run.json of a collected run, as it is read again."""

import json
from pathlib import Path

from clusterctl.errors import CollectError
from clusterctl.state.run_record import RunRecord
from tests.support.messages import refused
from tests.unit.runs.made import made_run


def test_read_names_the_key_that_is_wrong(tmp_path: Path) -> None:
    file = made_run(tmp_path).directory / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "final": "perhaps"}))
    with refused("record-damaged/run", CollectError, where=str(file)) as caught:
        RunRecord.load(file.parent)
    assert caught.value.why.partition(": ")[0] == "final"


def test_read_of_invalid_json_names_the_position(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"id": ')
    with refused("file-invalid/run", CollectError, "line 1"):
        RunRecord.load(tmp_path)
