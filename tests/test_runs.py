"""Run directories and atomic writes."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from specctl import lock, runs
from specctl.drafters import checkpoint
from specctl.errors import UsageError
from specctl.recipe import DistillRecipe, EvalRecipe, GenerateRecipe, LearnFromServerRecipe, OnlineRecipe, TrainRecipe
from specctl.training import checkpoint as training_checkpoint
from tests.conftest import holding


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    runs.atomic_write(path, "old")
    monkeypatch.setattr(runs.os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        runs.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no temporary file stays"


def test_a_failed_write_names_the_requested_file(tmp_path):
    """Not the temporary file beside it."""
    with pytest.raises(FileNotFoundError) as caught:
        runs.atomic_write(tmp_path / "absent" / "f", "text")
    assert caught.value.filename == str(tmp_path / "absent" / "f")


def test_a_read_only_file_system_names_the_requested_file(tmp_path, monkeypatch):
    """It refuses to remove the temporary file, although there is none, and that error hid the first one."""

    def refuse(path, **options):
        raise OSError(errno.EROFS, "Read-only file system", os.fspath(path))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only") as caught:
        runs.atomic_write(tmp_path / "f", "text")
    assert caught.value.filename == str(tmp_path / "f")


@pytest.mark.parametrize("damage", ["", "[]", "null"])
def test_a_damaged_record_of_a_run_is_written_anew(tmp_path, damage):
    """`--resume` ended in an unexpected error."""
    run = runs.Run.create("eval", EvalRecipe(), tmp_path / "r")
    run.annotate(target={"name": "builtin"})
    (tmp_path / "r" / "run.json").write_text(damage)
    run.annotate(seed=3)
    assert json.loads((tmp_path / "r" / "run.json").read_text()) == {"seed": 3}


def test_a_run_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = runs.Run.create("eval", EvalRecipe())
    assert run.dir.parent.name == "runs"
    run.annotate(target={"name": "builtin"})
    run.metrics(step=1, loss=float("inf"))
    run.metrics(step=2)
    document = run.result({"rows": []})
    about = json.loads((run.dir / "run.json").read_text())
    assert {"argv", "versions", "git", "hardware", "seed", "target"} <= set(about)
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] is None
    assert json.loads((run.dir / "result.json").read_text()) == document
    assert runs.Run.create("eval", EvalRecipe()).dir != run.dir, "runs of one second differ"


@pytest.mark.parametrize("there", [True, False])
def test_a_refused_run_removes_only_a_directory_of_its_own(tmp_path, there):
    """A user's empty output directory used to vanish."""
    place = tmp_path / "out"
    if there:
        place.mkdir()
    with pytest.raises(UsageError), runs.Run.create("eval", EvalRecipe(), place).held():
        raise UsageError("refused")
    assert place.exists() == there


def test_simultaneous_runs_get_different_names(tmp_path, monkeypatch):
    """In an array of a thousand jobs, some draw the same number."""
    monkeypatch.chdir(tmp_path)
    drawn = iter(["aa"] * 5 + ["bb"])
    monkeypatch.setattr(runs.secrets, "token_hex", lambda size: next(drawn))
    monkeypatch.setattr(runs.time, "strftime", lambda *_: "now")
    names = [runs.Run.create("eval", EvalRecipe()).dir.name for _ in range(2)]
    assert names == ["eval-now-aa", "eval-now-bb"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path, monkeypatch):
    """The next process in the directory removes them, but not files of running processes or unrelated files."""
    dead = 2**22 + 1  # above the largest process number
    left = [f".records.parquet.{dead}.tmp", f".drafter.{dead}-ab12.tmp"]
    kept = [f".records.parquet.{os.getpid()}.tmp", ".mine.tmp", "..7.tmp", f"x.{dead}.tmp", f".y.{dead}"]
    for name in left + kept:
        (tmp_path / name).mkdir() if "-ab" in name else (tmp_path / name).write_text("")
    monkeypatch.setenv("RANK", "1")
    runs.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*left, *kept}, "the first process alone holds the lock"
    monkeypatch.delenv("RANK")
    runs.remove_leftovers(tmp_path, "drafter")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left[0], *kept])
    with runs.Run(tmp_path).held():
        assert {path.name for path in tmp_path.iterdir()} == {*kept, lock.NAME}


def test_a_reused_directory_is_cleared_at_the_first_output(tmp_path):
    """Until then the command may still be refused, and the earlier run must stay."""
    out = tmp_path / "out"
    runs.Run.create("eval", EvalRecipe(limit=1), out).metrics(step=1)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = runs.Run.create("eval", EvalRecipe(limit=2), out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    again.annotate(target={})
    assert not (out / "metrics.jsonl").exists()
    assert "limit: 2" in (out / "recipe.resolved.yaml").read_text()
    again.metrics(step=2)
    again.annotate(more=1)
    assert (out / "metrics.jsonl").exists(), "a run begins once"


def test_metrics_of_a_resumed_run_list_each_step_once(tmp_path):
    """Steps after the saved state come again, an incomplete line is dropped, and nothing changes before the run
    begins."""
    first, out = runs.Run.create("eval", EvalRecipe(), tmp_path), tmp_path / "metrics.jsonl"
    for step in (1, 2):
        first.metrics(step=step)
    size = first.metrics_size
    first.metrics(step=3)
    before = out.read_bytes()

    def steps(place, kept):
        run = runs.Run.create("eval", EvalRecipe(), place)
        assert run.replaces_earlier == (place == tmp_path)
        run.resume_from(tmp_path, kept)
        assert out.read_bytes() == before
        run.annotate(target={})
        assert not run.replaces_earlier
        run.metrics(step="next")
        return [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]

    assert steps(tmp_path / "other", size) == [1, 2, "next"]
    assert steps(tmp_path / "lost its end", size - 5) == [1, "next"]
    assert steps(tmp_path, size) == [1, 2, "next"]
    runs.Run.create("eval", EvalRecipe(), tmp_path / "gone").resume_from(tmp_path / "nowhere", size)


def test_a_run_of_another_command_is_not_resumed(tmp_path):
    runs.Run.create("eval", EvalRecipe(), tmp_path).annotate(target={})
    resumed = OnlineRecipe(resume=True, output_dir=tmp_path)
    with pytest.raises(UsageError, match="holds a run of specctl eval"):
        runs.Run.create("online", resumed, tmp_path)


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file, not a directory"):
        runs.Run.create("eval", EvalRecipe(), tmp_path / "file/out")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="link is a link that leads nowhere"):
        runs.Run.create("eval", EvalRecipe(), tmp_path / "link")
    with pytest.raises(UsageError, match="File name too long"):
        runs.Run.create("eval", EvalRecipe(), tmp_path / ("x" * 300))


@pytest.mark.parametrize(("threads", "kept"), [(2, [2]), (None, []), (-1, []), (10**9, [])])
def test_a_resumed_run_uses_the_thread_count_of_the_first(tmp_path, monkeypatch, threads, kept):
    """Another number rounds differently, and a resumed run must equal an uninterrupted one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = runs.Run.create("eval", EvalRecipe(), tmp_path)
    run.annotate(target={})
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["hardware"]["threads"] == 1, "the tests compute with one"
    about["hardware"]["threads"] = threads
    (tmp_path / "run.json").write_text(json.dumps(about))
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    runs.Run.create("eval", EvalRecipe(), tmp_path).resume_from(tmp_path, 0)
    assert found == kept


def test_the_result_tells_how_busy_the_machine_was(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.threads.OtherProcesses, "busy", lambda self: 1.234)
    document = runs.Run.create("eval", EvalRecipe(), tmp_path).result({})
    assert document["machine"] == {"cores": runs.threads.cores(), "threads": 1, "others_busy": 1.23}


def test_writes_do_not_follow_links(tmp_path):
    """Neither at the path of the file nor at its temporary path."""
    (tmp_path / "victim").write_text("safe")
    for name in ("file", f".file.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    runs.atomic_write(tmp_path / "file", "text", 0o600)
    assert (tmp_path / "victim").read_text() == "safe" and (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600 and not (tmp_path / "file").is_symlink()
    run = runs.Run(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="a symbolic link"):
        run.metrics(step=1)
    assert (tmp_path / "victim").read_text() == "safe"


@pytest.mark.parametrize(
    ("command", "recipe", "private"),
    [
        ("generate", GenerateRecipe(prompt="hunter2"), True),
        ("eval", EvalRecipe(save_outputs=True), True),
        ("distill", DistillRecipe(log="a.jsonl"), True),
        ("learn-from-server", LearnFromServerRecipe(server={"urls": ["http://a"]}, traffic={"log": "a.jsonl"}), True),
        ("eval", EvalRecipe(), False),
        ("distill", DistillRecipe(), False),
        ("train-drafter", TrainRecipe(log=["tensorboard"]), False),
    ],
)
def test_a_run_with_texts_is_readable_by_its_owner_only(tmp_path, monkeypatch, command, recipe, private):
    """A new directory is private; in an existing one each file is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        for place in (None, tmp_path / "new", tmp_path / "there"):
            run = runs.Run.create(command, recipe, place)
            run.metrics(step=1)
            run.result({})
            assert run.dir.stat().st_mode & 0o077 == (0 if private and place != tmp_path / "there" else 0o055)
            modes = {path.name: path.stat().st_mode & 0o077 for path in run.dir.iterdir()}
            assert set(modes.values()) == {0 if private else 0o044}, modes
    finally:
        os.umask(before)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"command": 1', None], ids=["deep", "list", "half", "pipe"])
def test_an_invalid_run_json_is_ignored(tmp_path, pipe, content):
    """It gives no command and no thread count, and a pipe does not block."""
    if content is None:
        pipe(tmp_path / "run.json")
    else:
        (tmp_path / "run.json").write_text(content)
    runs.check_same_command(tmp_path, "eval")
    assert runs.threads_of(tmp_path) is None


def test_addresses_in_results_have_no_passwords(tmp_path):
    """Only strings that are an address as a whole are changed; other texts are kept."""
    run, said = runs.Run(tmp_path), "see http://a:b@c and password=x"
    given = {"servers": [{"server": "http://me:HUSH@host:80"}], "http://me:HUSH@host": 1, "text": said}
    document = run.result(given)
    run.metrics(**{"url": "http://me:HUSH@host", "pair": ("http://HUSH@a",)})
    run.annotate(urls=["http://me:HUSH@host"])
    assert document["servers"] == [{"server": "http://me:***@host:80"}] and document["text"] == said
    assert len(list(tmp_path.iterdir())) == 3 and holding(tmp_path, "HUSH") == []


def test_a_run_of_the_earlier_command_can_be_resumed(tmp_path):
    """Runs of `online --algo lr` from before `reason` existed, but not runs of another command."""
    (tmp_path / "run.json").write_text('{"command": "online"}')
    runs.check_same_command(tmp_path, "reason")
    with pytest.raises(UsageError, match="holds a run of specctl online"):
        runs.check_same_command(tmp_path, "replay")
    (tmp_path / "run.json").write_text('{"command": "route"}')
    runs.check_same_command(tmp_path, "serve")


ADAPTER = {"family": "eagle3", "architecture": {}, "target": {"name": "builtin"}, "lora": {"rank": 1, "alpha": 1.0}}
TENSORS = {"q_proj.lora_down": torch.ones(2)}


def facts(path):
    """Identity and state of a file or directory: a later write changes them."""
    about = os.stat(path)
    return about.st_ino, about.st_size, about.st_mtime_ns


@pytest.fixture
def disk(monkeypatch):
    """Record every rename: new path → the paths that were not flushed before it, and None once its folder is flushed
    after it if there were none."""
    flushed, renames, folders = set(), {}, {}
    rename = Path.rename

    def recorded(self, new):
        of = [self, *self.rglob("*")] if self.is_dir() else [self]
        renames[Path(new)] = [path for path in of if facts(path) not in flushed]
        folders[Path(new)] = os.stat(Path(new).parent).st_ino
        return rename(self, new)

    def fsync(descriptor):
        flushed.add(facts(descriptor))
        for place in [place for place, unflushed in renames.items() if not unflushed]:
            if os.fstat(descriptor).st_ino == folders[place]:
                renames[place] = None

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", recorded)
    return renames


def write_file(place):
    runs.atomic_write(place, "content")


def write_adapter(place):
    checkpoint.save(place, config=ADAPTER, tensors=TENSORS, info={}, overwrite=True)


def write_foreign(place):
    """As other libraries do, such as `save_pretrained`."""
    with checkpoint.staged(place) as draft:
        (draft / "templates").mkdir()
        for name in ("a.bin", "templates/b.jinja"):
            (draft / name).write_bytes(b"content")


def write_checkpoint(place):
    training_checkpoint.save_tensors(place.parent, 7, {"step": 7}, TENSORS, keep=2)


@pytest.mark.parametrize("write", [write_file, write_adapter, write_foreign, write_checkpoint])
def test_all_files_are_on_disk_before_they_get_their_name(tmp_path, disk, write):
    """The weights of training checkpoints and adapters, and exported files, were renamed unflushed. A power loss could
    leave empty files under the new name."""
    place = tmp_path / "step-00000007"
    for _ in range(2):  # the second one replaces the first
        write(place)
        assert disk.pop(place) is None
    assert os.listdir(tmp_path) == [place.name]


def test_an_unflushed_file_would_be_noticed(tmp_path, disk):
    (tmp_path / "draft").write_text("content")
    (tmp_path / "draft").rename(tmp_path / "place")
    assert disk == {tmp_path / "place": [tmp_path / "draft"]}


@pytest.mark.parametrize(("number", "works"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_file_systems_that_cannot_flush_directories_are_used(tmp_path, monkeypatch, number, works):
    """Some network file systems refuse it. A failing disk is an error."""

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if works:
        write_file(tmp_path / "file")
        assert (tmp_path / "file").read_text() == "content"
        return
    with pytest.raises(OSError, match=os.strerror(number)):
        write_file(tmp_path / "file")
