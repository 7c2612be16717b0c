"""Records are read back as they were written, or refused with the name of their file."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.decoding.records import Decoded
from specctl.errors import SpecctlError
from specctl.measuring.records import RECORDS, STAMP, Record, read_records, write_records

ORIGIN = {"recipe": {"limit": 1}, "target": {"name": "tiny", "weights": "ab"}}
PROMPTS = {str(number): [number, 1] for number in range(8)}


@pytest.fixture
def records(tmp_path):
    """Records in a file in tmp_path."""
    made = [
        Record(name, "sql", "lookup", 0, 0.0, Decoded(ids, [*range(40)], "eos", 20, 19, 1, 30, [19], [20], 0.1, 0.2))
        for name, ids in PROMPTS.items()
    ]
    write_records(tmp_path, made, ORIGIN)
    return made


def test_written_records_are_read_back(tmp_path, records):
    assert read_records(tmp_path, ORIGIN, PROMPTS) == records


def test_a_changed_page_is_refused(tmp_path, records):
    """A resumed run used to take over the changed values."""
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes().replace(b"lookup", b"lookuq", 1))  # in the dictionary of drafters
    with pytest.raises(SpecctlError, match=rf"cannot continue from .*{RECORDS}"):
        read_records(tmp_path, ORIGIN, PROMPTS)


@pytest.mark.parametrize("origin", [b"[]", b"{}", b'{"recipe": 1, "target": {}}', b'{"recipe": {}, "target": null}'])
def test_an_unreadable_origin_is_refused(tmp_path, records, origin):
    table = pq.read_table(tmp_path / RECORDS).replace_schema_metadata({STAMP: origin})
    pq.write_table(table, tmp_path / RECORDS)
    with pytest.raises(SpecctlError, match=rf"cannot continue from .*{RECORDS}"):
        read_records(tmp_path, ORIGIN, PROMPTS)


def test_records_without_a_column_are_refused(tmp_path, records):
    table = pq.read_table(tmp_path / RECORDS)
    for changed in (
        table.drop(["seed"]),
        table.drop(["output_ids"]),
        pa.table({"a": [1]}, metadata=table.schema.metadata),
    ):
        pq.write_table(changed, tmp_path / RECORDS)
        with pytest.raises(SpecctlError, match=rf"cannot continue from .*{RECORDS}"):
            read_records(tmp_path, ORIGIN, PROMPTS)
