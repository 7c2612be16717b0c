"""Reading a table returns the written values, or raises an error that names the damaged file."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.decoding.prompt_features import PromptClusters
from specctl.errors import CheckpointError
from specctl.lab.recorded import table_file
from specctl.lab.recorded.table_file import Header, read, read_table, write
from specctl.lab.recorded.trace import of_arms
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
    """Check that two rows have equal values of equal types."""
    assert (found.place, found.trace.query, found.trace.domain) == (
        expected.place, expected.trace.query, expected.trace.domain,
    )  # fmt: skip
    assert (found.trace.ended, found.trace.session) == (expected.trace.ended, expected.trace.session)
    for name in table_file.ARRAYS:
        ours, theirs = found.array(name), expected.array(name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name


def test_a_written_table_is_read_back(file, made_up):
    header, rows = read(file)
    assert header == Header(ARMS, DEPTH, STAMP, COSTS)
    for row in rows:
        assert_same(row, made_up(row.place))
    table = read_table(file, {"drafters": STAMP["drafters"], "arms": ARMS})
    assert [trace.query for trace in table.traces] == [made_up(place).trace.query for place in range(4)]
    assert (table.arms, table.depth, table.draft_s.tolist()) == (ARMS, DEPTH, COSTS["draft_s"])
    assert table.reach.tolist() == COSTS["reach"] and table.overheads.score.tolist() == COSTS["score"]


def test_a_table_of_another_pool_is_refused(file):
    for other in ({"drafters": {**STAMP["drafters"], "sql": "ff"}}, {"arms": ARMS[:2]}, {"drafters": {"sql": "ab12"}}):
        with pytest.raises(CheckpointError, match="recorded with different settings"):
            read_table(file, other)


def test_a_truncated_table_is_refused(file):
    whole = file.read_bytes()
    for end in [0, 3, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"table\.parquet"):
            read(file)


def test_every_altered_byte_is_detected_or_unused(file):
    """Parquet files contain bytes that no reader uses. The values read must still equal the written ones."""
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


def test_a_damaged_digest_is_refused(file):
    """A byte of it that was no UTF-8 ended a replay with an unexpected error."""
    whole, digest = file.read_bytes(), pq.read_schema(file).metadata[table_file.DIGEST]
    file.write_bytes(whole.replace(digest, bytes([digest[0] ^ 0x80]) + digest[1:]))
    with pytest.raises(CheckpointError, match="is damaged: its contents have changed"):
        read(file)


def test_arrays_of_a_wrong_shape_are_refused(file, made_up):
    row = made_up(0)
    narrow = dataclasses.replace(row, trace=dataclasses.replace(row.trace, gamma=row.trace.gamma[..., :-1]))
    write(file, Header(ARMS, DEPTH, STAMP, COSTS), [narrow])
    with pytest.raises(CheckpointError, match="damaged"):
        read(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stamp": None}, "stamp: "),
        ({"costs": 5}, "costs: "),
        ({"trained_on": [[([1.0], 1.0), ([1.0, 2.0], 1.0)]]}, "trained_on"),
        ({"costs": COSTS | {"draft_s": [0.1]}}, "draft_s do not fit its 3 arms"),
        ({"costs": COSTS | {"draft_s": ["a"] * 3}}, "draft_s are not numbers"),
        ({"costs": COSTS | {"draft_s": [float("nan")] * 3}}, "draft_s are not in 0"),
        ({"costs": COSTS | {"step_s": [0.0] * 4}}, "step_s are not in 0"),
        ({"costs": COSTS | {"reach": [10**9] * 3}}, "reach are not in 0"),
        ({"costs": {name: COSTS[name] for name in COSTS if name != "score"}}, "no costs score"),
    ],
    ids=str,
)
def test_a_header_that_no_recording_writes_is_refused(file, made_up, change, says):
    """Replays used to end with a traceback, or with a result of NaNs. The digest fits: another program wrote it."""
    write(file, dataclasses.replace(Header(ARMS, DEPTH, STAMP, COSTS), **change), [made_up(0)])
    with pytest.raises(CheckpointError, match=says) as refused:
        read_table(file)
    assert "\n" not in refused.value.message


def test_negative_numbers_of_accepted_tokens_are_refused(file, made_up):
    """A replay never came to the end of a text with a round of no tokens."""
    row = made_up(0)
    never = np.full_like(row.trace.accepted, -1)
    backwards = dataclasses.replace(row, trace=dataclasses.replace(row.trace, accepted=never))
    write(file, Header(ARMS, DEPTH, STAMP, COSTS), [backwards])
    with pytest.raises(CheckpointError, match="negative number of accepted tokens"):
        read(file)


def test_files_that_are_not_complete_tables_are_refused(file, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="does not exist"):
        read(tmp_path / "nothing.parquet")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read(tmp_path)
    pq.write_table(pa.table({"id": [1]}), file)
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}')  # it was called damaged, with the advice to overwrite it
    for other in (file, tmp_path / "p.jsonl"):
        with pytest.raises(CheckpointError, match="not a table of specctl"):
            read(other)
    write(file, Header(ARMS, DEPTH, STAMP), [])
    with pytest.raises(CheckpointError, match="piece of an unfinished table"):
        read_table(file)
    monkeypatch.setattr(table_file, "VERSION", 9)
    with pytest.raises(CheckpointError, match="version 5, but this specctl uses version 9"):
        read(file)


def test_prompt_features_are_read_back(file, made_up):
    rows = [made_up(place) for place in range(2)]
    rows[0] = dataclasses.replace(rows[0], trace=dataclasses.replace(rows[0].trace, context=np.arange(5) / 3))
    write(file, Header(ARMS, DEPTH, STAMP, COSTS), rows)
    first, second = read_table(file).traces
    assert np.array_equal(first.context, np.arange(5) / 3) and second.context is None


def test_training_clusters_are_read_back(file, made_up):
    kinds = [[([0.5, -1.0], 2.0)], [], [([1.0, 0.0], 1.0), ([0.0, 1.0], 3.0)]]
    write(file, Header(ARMS, DEPTH, STAMP, COSTS, trained_on=kinds), [made_up(0)])
    table = read_table(file)
    assert [own.pairs for own in table.trained_on] == kinds
    assert [own.pairs for own in of_arms(table, [ARMS[2], ARMS[1]]).trained_on] == [kinds[2], []]
    assert all(isinstance(own, PromptClusters) for own in table.trained_on)
