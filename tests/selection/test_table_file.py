"""What is read is what was written, or an error that names the file: damage never becomes numbers."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.errors import CheckpointError
from specctl.selection import table_file
from specctl.selection.table_file import Header, read, read_table, write
from tests.selection.conftest import ARMS, DEPTH

STAMP = {"target": {"name": "tiny", "revision": None}, "drafters": {"sql": "ab12", "lookup": "lookup"}, "exact": False}
COSTS = {
    "draft_s": [0.1, 0.2, 0.3],
    "step_s": [1.0, 1.1, 1.2, 1.3],
    "reach": [4, 2, 3],
    "read": [[0.1, 0.01], [0.2, 0.02], [0.3, 0.03]],
    "score": [[[0.4, 0.04], [0.6, 0.06]]] * 3,
}


@pytest.fixture
def file(tmp_path, made_up):
    path = tmp_path / "table.parquet"
    write(path, Header(ARMS, DEPTH, STAMP, COSTS), [made_up(place) for place in range(4)])
    return path


def assert_same(found, expected):
    """Two rows with equal values of equal types."""
    assert (found.place, found.trace.query, found.trace.domain) == (
        expected.place, expected.trace.query, expected.trace.domain,
    )  # fmt: skip
    assert (found.trace.ended, found.trace.session) == (expected.trace.ended, expected.trace.session)
    for name in table_file.ARRAYS:
        ours, theirs = found.array(name), expected.array(name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name


def test_round_trip(file, made_up):
    header, rows = read(file)
    assert header == Header(ARMS, DEPTH, STAMP, COSTS)
    for row in rows:
        assert_same(row, made_up(row.place))
    table = read_table(file, {"drafters": STAMP["drafters"], "arms": ARMS})
    assert [trace.query for trace in table.traces] == [made_up(place).trace.query for place in range(4)]
    assert (table.arms, table.depth, table.draft_s.tolist()) == (ARMS, DEPTH, COSTS["draft_s"])
    assert table.reach.tolist() == COSTS["reach"] and table.overheads.score.tolist() == COSTS["score"]


def test_a_pool_that_is_another_one(file):
    for other in ({"drafters": {**STAMP["drafters"], "sql": "ff"}}, {"arms": ARMS[:2]}, {"drafters": {"sql": "ab12"}}):
        with pytest.raises(CheckpointError, match="recorded otherwise"):
            read_table(file, other)


def test_cut_short(file):
    whole = file.read_bytes()
    for end in [0, 3, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"table\.parquet"):
            read(file)


def test_every_altered_byte_is_seen_or_unused(file):
    """Parquet has bytes that no reader looks at; whatever is read is what was written."""
    whole, seen = file.read_bytes(), 0
    header, rows = read(file)
    places = range(0, len(whole), len(whole) // 150)
    for at in places:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = read(file)
        except CheckpointError:
            seen += 1
        else:
            assert found[0] == header
            for one, other in zip(found[1], rows, strict=True):
                assert_same(one, other)
    assert seen > len(places) / 2


def test_values_of_another_shape(file, made_up):
    row = made_up(0)
    narrow = dataclasses.replace(row, trace=dataclasses.replace(row.trace, gamma=row.trace.gamma[..., :-1]))
    write(file, Header(ARMS, DEPTH, STAMP, COSTS), [narrow])
    with pytest.raises(CheckpointError, match="damaged"):
        read(file)


def test_what_is_no_table(file, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no table"):
        read(tmp_path / "nothing.parquet")
    with pytest.raises(CheckpointError, match="no table"):
        read(tmp_path)
    pq.write_table(pa.table({"id": [1]}), file)
    with pytest.raises(CheckpointError, match="no table of specctl"):
        read(file)
    write(file, Header(ARMS, DEPTH, STAMP), [])
    with pytest.raises(CheckpointError, match="piece of a table"):
        read_table(file)
    monkeypatch.setattr(table_file, "READABLE", (9,))
    with pytest.raises(CheckpointError, match="version 3"):
        read(file)


def test_tables_of_version_1_have_no_sessions(file, made_up, monkeypatch):
    """Neither column nor digest knew of them; the tables are as good as ever."""
    rows = [made_up(place) for place in range(3)]
    old = [dataclasses.replace(row, trace=dataclasses.replace(row.trace, session=None, prompt=None)) for row in rows]
    monkeypatch.setattr(table_file, "VERSION", 1)
    costs = {name: COSTS[name] for name in ("draft_s", "step_s")}
    write(file, Header(ARMS, DEPTH, STAMP, costs), old)
    pq.write_table(pq.read_table(file).drop_columns(["session", "prompt"]), file)
    assert not {"session", "prompt"} & {*pq.read_schema(file).names}
    assert read_table(file).overheads is None and read_table(file).reach is None
    for one, other in zip(read(file)[1], old, strict=True):
        assert_same(one, other)
