"""A recording that is interrupted loses little and repeats nothing."""

import pytest

from specctl.errors import CheckpointError, UsageError
from specctl.lab.recorded import recording as recording
from specctl.lab.recorded.recording import Recording, pieces
from specctl.lab.recorded.table_file import Header, read, read_table
from tests.selection.conftest import ARMS, DEPTH
from tests.selection.test_table_file import COSTS, assert_same

HEADER = Header(ARMS, DEPTH, {"stream": "of prompts", "drafters": {"sql": "ab12"}})
PLACES = [0, 1, 3, 4, 6]  # the missing places had answers of one token


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.parquet"


def record(path, rows, stop_before=None, **options):
    """Record the missing rows, or stop before one of them as an interrupted process does."""
    with Recording(path, HEADER, **options) as kept:
        for row in rows:
            if row.place == stop_before:
                raise KeyboardInterrupt
            if row.place >= kept.next:
                kept.add(row)
        kept.finish(COSTS)


def test_an_interrupted_recording_equals_an_uninterrupted_one(path, made_up):
    rows = [made_up(place) for place in PLACES]
    for stop in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            record(path, rows, stop_before=stop, resume=True)
        assert not path.exists()
    assert len(list(pieces(path).glob("*.parquet"))) == 2
    record(path, rows, resume=True)
    found = read(path)[1]
    for one, other in zip(found, rows, strict=True):
        assert_same(one, other)
    assert not pieces(path).exists() and read_table(path).step_s.tolist() == COSTS["step_s"]


def test_a_killed_recording_keeps_its_rows(path, made_up, monkeypatch):
    """The process dies without `__exit__`, so its lock remains. The rows written before are there, and the lock's owner
    is known to be dead."""
    monkeypatch.setattr(recording, "KEEP_EVERY_S", -1.0)
    first = Recording(path, HEADER).__enter__()
    first.add(made_up(0))
    first.add(made_up(1))
    with pytest.raises(UsageError, match="being written"), Recording(path, HEADER, resume=True):
        pass
    first._lock._ended.set()  # a dead process cannot release its lock: another file may get the same descriptor
    first._lock._file.close()  # as the kernel does
    with Recording(path, HEADER, resume=True) as second:
        assert second.next == 2


def test_existing_tables_and_pieces_are_not_overwritten(path, made_up):
    rows = [made_up(place) for place in PLACES]
    with pytest.raises(KeyboardInterrupt):
        record(path, rows, stop_before=3)
    with pytest.raises(UsageError, match="is incomplete"):
        record(path, rows)
    record(path, rows[:1], overwrite=True)
    assert len(read_table(path).traces) == 1
    with pytest.raises(UsageError, match="exists"):
        record(path, rows)


def test_pieces_of_another_recording_or_damaged_pieces_are_refused(path, made_up):
    with pytest.raises(KeyboardInterrupt):
        record(path, [made_up(place) for place in PLACES], stop_before=3)
    other = Header(ARMS, DEPTH, {**HEADER.stamp, "drafters": {"sql": "ff"}})
    with pytest.raises(UsageError, match='sql was "ab12" and is "ff" now'), Recording(path, other, resume=True):
        pass
    (piece,) = pieces(path).glob("*.parquet")
    piece.write_bytes(piece.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=piece.name), Recording(path, HEADER, resume=True):
        pass
