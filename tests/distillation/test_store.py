"""Stored responses are never lost or repeated: kills, torn writes, second writers and flipped bytes."""

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import time

import pytest

from specctl import lock
from specctl.distillation import shards, store
from specctl.distillation.store import ShardLayout, ShardWriter
from specctl.errors import DataError, SpecctlError, UsageError

META = {"domain": "sql", "target": {"name": "builtin", "hidden_size": 256}, "sampling": {"seed": 0}}


def row(i: int) -> shards.Record:
    return {
        "id": f"{i:032x}",
        "prompt_id": f"{i % 7:032x}",
        "domain": "sql",
        "messages": [{"role": "user", "content": f"question {i}\u2028é\n"}],
        "prompt_ids": [1, i],
        "response_ids": list(range(i % 5 + 1)),
        "text": f"SELECT {i}",
        "temperature": (0.0, 0.3, 0.7, 1.0)[i % 4],
        "seed": 2**59 + i,
        "stop": "eos",
        "target": "cafe",
    }


ROWS = [row(i) for i in range(40)]


def written_as(resume=False, overwrite=False, shard_size=6, **layout):
    return {"layout": ShardLayout(size=shard_size, **layout), "resume": resume, "overwrite": overwrite}


def fill(directory, rows=ROWS, batch=4, **options) -> None:
    """Write rows like `distill`: skip finished rows, append in batches, complete."""
    with ShardWriter(directory, META, **written_as(**options)) as writer:
        pending = [row for row in rows if row["id"] not in writer.done]
        for start in range(0, len(pending), batch):
            writer.append(pending[start : start + batch])
        writer.complete()


def leave_open(directory, rows=ROWS[:10], **options) -> None:
    with ShardWriter(directory, META, **written_as(**options)) as writer:
        writer.append(rows)


def by_id(directory) -> list[shards.Record]:
    return sorted(store.read(directory), key=lambda record: record["id"])


def test_records_survive_writing_and_reading(tmp_path):
    fill(tmp_path)
    assert list(store.read(tmp_path)) == ROWS
    found = store.summary(tmp_path)
    assert (found.responses, found.shards, found.complete) == (40, 7, True)
    assert found.response_tokens == sum(len(record["response_ids"]) for record in ROWS)
    assert found.meta["target"] == META["target"]
    assert not list(tmp_path.glob("*.lock"))


def test_a_shard_replaced_by_a_link_is_not_written(tmp_path):
    """Otherwise anyone with write access to the directory could redirect responses to another file."""
    place = tmp_path / "store"
    leave_open(place, ROWS[:2])
    with ShardWriter(place, META, **written_as(resume=True)) as writer:
        (shard,) = place.glob("shard-*.jsonl")
        victim = shard.rename(tmp_path / "victim")
        before = victim.read_bytes()
        shard.symlink_to(victim)
        with pytest.raises(OSError, match="symbolic link"):
            writer.append(ROWS[2:4])
    assert victim.read_bytes() == before


def test_datasets_can_read_the_shards(tmp_path):
    from datasets import load_dataset

    fill(tmp_path)
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    table = load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert table.num_rows == 40
    assert [{name: record[name] for name in shards.FIELDS} for record in table] == ROWS


def test_kills_lose_and_repeat_nothing(tmp_path):
    """Writers are killed at random moments, then one finishes."""
    rows, delays, context = [row(i) for i in range(150)], random.Random(0), multiprocessing.get_context("fork")
    options = {"rows": rows, "batch": 2, "resume": True}
    started = time.process_time()  # other processes lengthen no delay
    fill(tmp_path / "undisturbed", **options)
    undisturbed = time.process_time() - started
    killed = 0
    for attempt in range(12):
        directory = tmp_path / str(attempt // 6)  # up to six deaths each
        writer = context.Process(target=fill, args=(directory,), kwargs=options)
        writer.start()
        writer.join(delays.uniform(0, undisturbed / 2))
        writer.kill()
        writer.join()
        killed += writer.exitcode == -signal.SIGKILL
        assert writer.exitcode in (0, -signal.SIGKILL)
        if attempt % 6 == 5:
            fill(directory, **options)
            assert by_id(directory) == rows
            assert store.summary(directory).complete
    assert killed  # negative control; the number of kills depends on the machine


def test_an_open_shard_torn_at_any_byte_is_resumed(tmp_path):
    """A power cut may leave any prefix of the last write."""
    leave_open(tmp_path, ROWS[:3])
    (path,) = shards.files(tmp_path, "shard")
    whole = path.read_bytes()
    for cut in [0, 1, *range(len(whole) // 3, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        assert list(store.read(tmp_path)) == ROWS[:lines]
        fill(tmp_path, ROWS[:5], resume=True)
        assert by_id(tmp_path) == ROWS[:5]
        for file in [*shards.files(tmp_path, "shard"), *shards.files(tmp_path, "manifest")]:
            file.unlink()


def test_a_lost_manifest_is_rebuilt(tmp_path):
    fill(tmp_path)
    (tmp_path / "manifest-0of1.json").unlink()
    fill(tmp_path, resume=True)
    assert by_id(tmp_path) == ROWS and store.summary(tmp_path).complete


@pytest.mark.parametrize("damage", ["flip", "truncate", "append"])
def test_a_damaged_sealed_shard_is_named_and_can_be_regenerated(tmp_path, damage):
    fill(tmp_path)
    path = shards.files(tmp_path, "shard")[2]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[:-5] if damage == "truncate" else content + b"x" * (damage == "append"))
    for attempt in (lambda: list(store.read(tmp_path)), lambda: fill(tmp_path, resume=True)):
        with pytest.raises(DataError, match=path.name) as caught:
            attempt()
        assert "--resume" in caught.value.hint
    path.unlink()
    with pytest.raises(DataError, match=f"{path.name} is missing"):
        list(store.read(tmp_path))
    fill(tmp_path, resume=True)
    assert by_id(tmp_path) == ROWS


@pytest.mark.parametrize("ids", [[None], ["1"], [1.0], [True], [-1], [2**31], [[1]]])
@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
def test_values_that_are_not_tokens_are_named(tmp_path, name, ids):
    """Also in a shard without a manifest."""
    leave_open(tmp_path, [ROWS[0], {**ROWS[1], name: ids}])
    with pytest.raises(DataError, match=rf"shard-0of1-00000\.jsonl:2: `{name}` contains values that are not token"):
        list(store.read(tmp_path))


def test_shards_in_parquet_are_refused_by_name(tmp_path):
    """Earlier versions wrote them with `format=parquet`."""
    (tmp_path / "shard-0of1-00000.parquet").write_bytes(b"PAR1")
    for read in (store.read, store.summary):
        with pytest.raises(DataError, match=f"{tmp_path} has shards in Parquet"):
            read(tmp_path)


@pytest.mark.parametrize("line", [b"{}", b"[]", b"nonsense", b'{"id": 3}', b"\xff"])
def test_a_garbled_line_in_an_open_shard_is_named(tmp_path, line):
    leave_open(tmp_path, ROWS[:2])
    (path,) = shards.files(tmp_path, "shard")
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(DataError, match=f"{path.name}:3"):
        list(store.read(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"shards": 3}',
        '{"shards": [{}]}',
        '{"complete": true, "shards": [{"file": "../x", "records": 1, "tokens": 1, "sha256": ""}]}',
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    fill(tmp_path)
    (tmp_path / "manifest-0of1.json").write_text(text)
    for attempt in (
        lambda: list(store.read(tmp_path)),
        lambda: store.summary(tmp_path),
        lambda: fill(tmp_path, resume=True),
    ):
        with pytest.raises(DataError, match=r"manifest-0of1\.json"):
            attempt()


def test_a_manifest_that_is_no_file_is_named(tmp_path):
    """It used to count as missing, so that the shards were read without a comparison of their digests."""
    fill(tmp_path)
    manifest = tmp_path / "manifest-0of1.json"
    manifest.unlink()
    for make in (manifest.mkdir, lambda: manifest.symlink_to(manifest.name)):
        make()
        with pytest.raises(DataError, match=r"manifest-0of1\.json cannot be read"):
            list(store.read(tmp_path))
        manifest.rmdir() if manifest.is_dir() else manifest.unlink()


def test_a_manifest_of_one_of_many_writers_does_not_complete_the_data(tmp_path):
    """Checked without a list of all writers, because a file name can claim any number."""
    fill(tmp_path)
    (tmp_path / "manifest-0of99999999999.json").write_text('{"complete": true, "shards": []}')
    (tmp_path / "manifest-0of1.json").unlink()
    assert not store.summary(tmp_path).complete


def test_existing_data_needs_resume_or_overwrite(tmp_path):
    fill(tmp_path, ROWS[:9])
    with pytest.raises(UsageError, match="already") as caught:
        fill(tmp_path)
    assert "--resume" in caught.value.hint and "--overwrite" in caught.value.hint
    fill(tmp_path, ROWS[20:], overwrite=True)
    assert list(store.read(tmp_path)) == ROWS[20:]


def test_other_settings_are_refused_by_name(tmp_path):
    leave_open(tmp_path)
    other = {**META, "target": {"name": "builtin", "hidden_size": 512}, "extra": 1}
    with pytest.raises(DataError) as caught:
        ShardWriter(tmp_path, other, resume=True)
    assert "target.hidden_size was 256 and is 512 now" in caught.value.message
    assert "extra was null and is 1 now" in caught.value.message
    fill(tmp_path, resume=True)  # the refusals left no lock and no damage
    assert by_id(tmp_path) == ROWS
    with ShardWriter(tmp_path, other, overwrite=True):
        pass


def test_an_adapter_may_get_another_name_at_the_engine(tmp_path):
    """Without a digest, adapters differ by their names alone."""
    adapter = META["target"] | {"adapter": "loras/law", "adapter_weights": "ab"}
    for place, target in (("known", adapter), ("unknown", META["target"])):
        with ShardWriter(tmp_path / place, {**META, "target": target, "model": "law"}, **written_as()) as writer:
            writer.append(ROWS[:2])
    with ShardWriter(tmp_path / "known", {**META, "target": adapter, "model": "law-2"}, **written_as(resume=True)):
        pass
    with pytest.raises(DataError, match='model was "law" and is "law-2" now'):
        ShardWriter(tmp_path / "unknown", {**META, "model": "law-2"}, **written_as(resume=True))


def test_changed_target_weights_are_refused(tmp_path):
    """Even under the same path. Data written before weights had digests can be continued."""
    of = {name: {**META, "target": META["target"] | {"weights": name}} for name in ("ab", "cd")}
    with ShardWriter(tmp_path / "new", of["ab"]) as writer:
        writer.append(ROWS[:2])
    with pytest.raises(DataError, match=r'target\.weights was "ab" and is "cd" now'):
        ShardWriter(tmp_path / "new", of["cd"], resume=True)
    leave_open(tmp_path / "old")
    with ShardWriter(tmp_path / "old", of["ab"], resume=True) as writer:
        assert len(writer.done) == 10


def test_array_jobs_share_a_directory(tmp_path):
    parts = {i: [record for record in ROWS if int(record["id"], 16) % 3 == i] for i in range(3)}
    for i in (0, 2):
        fill(tmp_path, parts[i], writer=(i, 3))
    assert not store.summary(tmp_path).complete
    with pytest.raises(UsageError):
        fill(tmp_path, writer=(0, 1))
    leave_open(tmp_path, parts[1][:2], writer=(1, 3))
    fill(tmp_path, writer=(0, 1), resume=True)  # one job completes the data of the array
    assert by_id(tmp_path) == ROWS
    assert store.summary(tmp_path).complete


def test_overwriting_a_part_needs_the_settings_of_the_other_parts(tmp_path):
    """The refusal must come before its own shards are deleted."""
    for writer in ((0, 2), (1, 2)):
        fill(tmp_path, writer=writer)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match=r"sampling\.seed was 0 and is 1 now"):
        ShardWriter(tmp_path, META | {"sampling": {"seed": 1}}, ShardLayout((0, 2)), overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def hold(directory, ready, leave):
    with ShardWriter(directory, META):
        ready.set()
        leave.wait()


def test_a_second_writer_is_refused(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    first = context.Process(target=hold, args=(tmp_path, ready, leave))
    first.start()
    assert ready.wait(20)
    for writer in [(0, 1), (0, 2)]:  # the same shard, and an overlapping split
        with pytest.raises(UsageError, match=f"being written by process {first.pid} on {socket.gethostname()}"):
            ShardWriter(tmp_path, META, ShardLayout(writer), resume=True)
    leave.set()
    first.join()
    assert first.exitcode == 0
    fill(tmp_path)


def test_the_lock_of_a_dead_process_does_not_block(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    path = tmp_path / "writer-0of1.lock"
    path.write_text(json.dumps({"host": "pod-7f9c", "pid": os.getpid(), "time": "2026-01-01"}))
    fill(tmp_path)  # even if the process id is in use again
    assert f"from process {os.getpid()} on pod-7f9c" in capsys.readouterr().err
    assert not path.exists()


def test_a_full_disk_keeps_written_records(tmp_path):
    leave_open(tmp_path, ROWS[:4], shard_size=100)
    size = shards.files(tmp_path, "shard")[0].stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(SpecctlError, match="cannot write") as caught:
            fill(tmp_path, shard_size=100, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--resume" in caught.value.hint
    assert list(store.read(tmp_path)) == ROWS[:4]
    fill(tmp_path, resume=True)
    assert by_id(tmp_path) == ROWS


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SpecctlError, match="cannot write"):
        fill(tmp_path)
    tmp_path.chmod(0o700)


def test_a_directory_without_data_is_an_error(tmp_path):
    assert not store.exists(tmp_path / "absent")
    for ask in (store.read, store.summary):
        with pytest.raises(DataError, match="no distilled data") as caught:
            ask(tmp_path)
        assert "specctl distill" in caught.value.hint
