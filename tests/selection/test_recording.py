"""A recording that stops anywhere loses little and repeats nothing."""

import os

import pytest

from specctl.errors import CheckpointError, UsageError
from specctl.lab.recorded import recording as recording
from specctl.lab.recorded.recording import Recording, pieces
from specctl.lab.recorded.table_file import Header, read, read_table
from tests.selection.conftest import ARMS, DEPTH
from tests.selection.test_table_file import COSTS, assert_same

HEADER = Header(ARMS, DEPTH, {"stream": "of prompts", "drafters": {"sql": "ab12"}})
PLACES = [0, 1, 3, 4, 6]  # the others had nothing to draft for


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.parquet"


def record(path, rows, stop_before=None, **options):
    """Record what is missing; ends like a process that is told to stop."""
    with Recording(path, HEADER, **options) as kept:
        for row in rows:
            if row.place == stop_before:
                raise KeyboardInterrupt
            if row.place >= kept.next:
                kept.add(row)
        kept.finish(COSTS)


def test_in_one_go_or_in_three(path, made_up):
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


def test_killed_without_a_word(path, made_up, monkeypatch):
    """No `__exit__`, and the lock stays: what was kept by then is there, and its writer is known to be dead."""
    monkeypatch.setattr(recording, "KEEP_EVERY_S", -1.0)
    first = Recording(path, HEADER).__enter__()
    first.add(made_up(0))
    first.add(made_up(1))
    with pytest.raises(UsageError, match="being written"), Recording(path, HEADER, resume=True):
        pass
    first._lock._ended.set()  # the dead do not sign: another file may get the number of theirs
    os.close(first._lock._fd)  # as the kernel does for them
    with Recording(path, HEADER, resume=True) as second:
        assert second.next == 2


def test_nothing_is_overwritten_by_accident(path, made_up):
    rows = [made_up(place) for place in PLACES]
    with pytest.raises(KeyboardInterrupt):
        record(path, rows, stop_before=3)
    with pytest.raises(UsageError, match="is incomplete"):
        record(path, rows)
    record(path, rows[:1], overwrite=True)
    assert len(read_table(path).traces) == 1
    with pytest.raises(UsageError, match="exists"):
        record(path, rows)


def test_only_its_own_pieces(path, made_up):
    with pytest.raises(KeyboardInterrupt):
        record(path, [made_up(place) for place in PLACES], stop_before=3)
    other = Header(ARMS, DEPTH, {**HEADER.stamp, "drafters": {"sql": "ff"}})
    with pytest.raises(UsageError, match="sql was ab12, is ff"), Recording(path, other, resume=True):
        pass
    (piece,) = pieces(path).glob("*.parquet")
    piece.write_bytes(piece.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=piece.name), Recording(path, HEADER, resume=True):
        pass
