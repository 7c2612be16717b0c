"""The prompt stream: in order, in chunks, lazily, and resumable at any chunk."""

import io
import json
import os
import select
import signal
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from specctl.adaptation.stream import PromptStream
from specctl.distillation import line_streams
from specctl.distillation.rejections import Rejections
from specctl.errors import DataError, Interrupted, UsageError
from specctl.progress import interrupts
from specctl.recipe import DataRecipe, StreamRecipe


@pytest.fixture(autouse=True)
def no_signal():
    yield
    interrupts.reset()


def sigterm():
    interrupts.handle(signal.SIGTERM)


def line(text):
    return json.dumps({"prompt": text}).encode() + b"\n"


def write(path, *lines):
    path.write_bytes(b"".join(lines))
    return str(path)


@pytest.fixture
def file(tmp_path):
    """A file with ten prompts."""
    return write(tmp_path / "p.jsonl", *(line(f"What is {n} + 1?") for n in range(10)))


@pytest.fixture
def make(target):
    def make(data=None, size=4, allowed=1.0, rejected=None, **recipe):
        stream = {"split": "train"} | recipe
        return PromptStream(
            data or DataRecipe(), StreamRecipe(**stream), target, Rejections(rejected, allowed), size=size
        )

    return make


def texts(chunks):
    return [[one.prompt.messages[-1]["content"] for one in chunk] for chunk in chunks]


def domains(chunks):
    return [one.prompt.domain for chunk in chunks for one in chunk]


def test_chunks_of_a_file_keep_its_order(make, file, target):
    stream = make(DataRecipe(prompts=file))
    found = list(stream.chunks())
    assert texts(found) == [[f"What is {n} + 1?" for n in part] for part in (range(4), range(4, 8), range(8, 10))]
    assert found[0][0].ids == target.render(found[0][0].prompt.messages)
    assert (stream.total, stream.position()["prompts"], stream.position()["chunks"]) == (10, 10, 3)


def test_repeated_prompts_are_kept(make, tmp_path):
    file = write(tmp_path / "p.jsonl", line("a"), line("a"), line("b"))
    assert texts(make(DataRecipe(prompts=file)).chunks()) == [["a", "a", "b"]]


class Endless(io.BytesIO):
    """A stdin that fails if asked for more than is there."""

    def readline(self, size=-1):
        found = super().readline(size)
        assert found, "waited for a line that was not needed"
        return found


def test_a_full_chunk_is_returned_at_once(make, monkeypatch):
    """`tail -f` never ends, so neither the end nor the next line may be waited for."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Endless(line("a") + b"{\n" + line("b") + line("c"))))
    stream = make(DataRecipe(prompts="-"), size=2)
    assert texts([next(stream.chunks())]) == [["a", "b"]]
    (reason,) = stream.rejections.reasons
    assert reason.startswith("<stdin>:2: not JSON")


def test_the_limit_ends_stdin(make, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Endless(b"".join(map(line, "abc")))))
    assert texts(make(DataRecipe(prompts="-", limit=3), size=2).chunks()) == [["a", "b"], ["c"]]


@pytest.fixture
def pipe(monkeypatch):
    """A real stdin with an open writer."""
    reader, writer = os.pipe()
    monkeypatch.setattr(line_streams, "POLL_S", 0.01)
    with os.fdopen(reader) as stdin, os.fdopen(writer, "wb", 0) as end:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield end


def test_sigterm_ends_a_silent_stdin(make, pipe, monkeypatch, capsys):
    """Python resumes a read interrupted by a signal, so the run would not stop before the next line."""
    real = select.select

    def silent(*args):
        ready = real(*args)
        if not ready[0]:
            sigterm()
        return ready

    monkeypatch.setattr(line_streams.select, "select", silent)
    pipe.write(line("a") + line("b") + line("c") + line("d")[:5])
    chunks = make(DataRecipe(prompts="-"), size=2).chunks()
    assert texts([next(chunks)]) == [["a", "b"]]
    with pytest.raises(Interrupted):
        next(chunks)
    assert "after the first 2 prompts are not answered" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_stream(make, pipe):
    pipe.write(line("a") + line("b") + line("c"))
    pipe.close()
    assert texts(make(DataRecipe(prompts="-"), size=2).chunks()) == [["a", "b"], ["c"]]


def test_a_schedule_of_generators_continues_each_domain(make):
    found = list(make(schedule=["sql:5", "math:3", "sql:2"]).chunks())
    assert domains(found) == ["sql"] * 5 + ["math"] * 3 + ["sql"] * 2
    ids = [one.prompt.id for chunk in found for one in chunk]
    assert len(set(ids)) == 10, "a domain that comes back goes on where it stopped"
    assert [len(chunk) for chunk in found] == [4, 4, 2]


@pytest.mark.parametrize("kind", ["mix", "drift"])
def test_mixtures_keep_the_order_of_each_domain(make, kind):
    plain = list(make(schedule=["sql:12", "math:12"]).chunks())
    mixed = list(make(schedule=["sql:12", "math:12"], kind=kind).chunks())
    assert domains(mixed) != domains(plain)
    for domain in ("sql", "math"):
        of = [
            [one.prompt.id for chunk in way for one in chunk if one.prompt.domain == domain] for way in (plain, mixed)
        ]
        assert of[0] == of[1]


def test_whole_files_are_mixed_without_a_schedule(make, tmp_path):
    for domain, count in (("a", 5), ("b", 9)):
        write(tmp_path / f"{domain}.jsonl", *(line(f"{domain}{n}") for n in range(count)))
    data = DataRecipe(prompts=str(tmp_path / "{domain}.jsonl"), domain=["a", "b"])
    found = domains(make(data, kind="mix").chunks())
    assert (found.count("a"), found.count("b")) == (5, 9) and found != sorted(found)


@pytest.mark.parametrize("kind", ["abrupt", "mix", "drift"])
def test_a_resumed_stream_gives_the_remaining_chunks(make, kind):
    """After every chunk, for every kind of schedule."""
    schedule = {"schedule": ["sql:6", "math:5"], "kind": kind}
    whole = texts(make(**schedule).chunks())
    for done in range(len(whole) + 1):
        first = make(**schedule)
        chunks = first.chunks()
        for _ in range(done):
            next(chunks)
        rest = make(**schedule)
        rest.resume(json.loads(json.dumps(first.position())))
        assert texts(rest.chunks()) == whole[done:]


def test_resuming_a_file_counts_rejected_lines_once(make, tmp_path):
    """Lines are read again, but `rejected.jsonl` and the counts equal one pass."""
    file = write(
        tmp_path / "p.jsonl", line("a"), b"{\n", line("b"), line("word " * 3000), line("c"), b"[]\n", line("d")
    )
    first = make(DataRecipe(prompts=file), size=2, rejected=tmp_path / "rejected.jsonl")
    next(first.chunks())
    again = make(DataRecipe(prompts=file), size=2, rejected=tmp_path / "rejected.jsonl")
    again.resume(first.position())
    assert texts(again.chunks()) == [["c", "d"]]
    rows = [json.loads(row) for row in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [row["where"] for row in rows] == [f"{file}:{n}" for n in (2, 6, 4)]
    assert "do not fit the target's context" in rows[2]["reason"]
    assert (again.rejections.count, again.rejections.seen) == (3, 7)


def test_a_changed_stream_is_not_resumed(make, tmp_path, file):
    first = make(DataRecipe(prompts=file))
    next(first.chunks())
    for changed in (
        write(tmp_path / "q.jsonl", line("x"), *map(line, "abcdef")),
        write(tmp_path / "r.jsonl", line("a")),
    ):
        other = make(DataRecipe(prompts=changed))
        with pytest.raises(DataError, match="does not begin with the 4 prompts"):
            other.resume(first.position())


def test_stdin_cannot_be_rewound(make, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"".join(map(line, "abc")))))
    stream = make(DataRecipe(prompts="-"), size=2)
    position = {"chunks": 3, "prompts": 6, "digest": "0" * 16}
    with pytest.raises(UsageError, match="after its first 6 prompts") as caught:
        stream.resume(position)
    assert "continue with new lines from stdin" in caught.value.hint
    stream.resume(position, rewind=False)
    assert texts(stream.chunks()) == [["a", "b"], ["c"]]
    assert stream.position()["prompts"] == 9 and stream.position()["chunks"] == 5


def test_sigterm_between_prompts_drops_the_unfinished_chunk(make, file):
    """A resumed run starts with that chunk."""
    stream = make(DataRecipe(prompts=file))
    chunks = stream.chunks()
    next(chunks)
    sigterm()
    with pytest.raises(Interrupted):
        next(chunks)
    interrupts.reset()
    again = make(DataRecipe(prompts=file))
    again.resume(stream.position())
    assert texts(again.chunks())[0][0] == "What is 4 + 1?"


def test_empty_streams_are_refused(make, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no prompts in .*p\.jsonl"):
        make(DataRecipe(prompts=write(tmp_path / "p.jsonl", b"\n  \n")))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\n")))
    with pytest.raises(DataError, match="no prompts in <stdin>"):
        list(make(DataRecipe(prompts="-")).chunks())


def test_a_schedule_for_more_prompts_than_exist_is_refused(make, file):
    """Before the first prompt is answered, with the number of valid prompts."""
    with pytest.raises(DataError, match=r"p\.jsonl has 10 prompts, but the schedule asks for 11 of legal"):
        make(DataRecipe(prompts=file), schedule=["legal:6", "legal:5"])
    assert len(domains(make(DataRecipe(prompts=file), schedule=["legal:10"]).chunks())) == 10


def test_prompts_too_long_for_the_target_are_skipped_with_a_warning(make, tmp_path, capsys):
    file = write(tmp_path / "p.jsonl", line("a"), line("word " * 3000), line("b"))
    assert texts(make(DataRecipe(prompts=file), schedule=["legal:3"]).chunks()) == [["a", "b"]]
    assert "asks for 3 prompts, but only 2" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [{"schedule": ["sql:2", "maths:2"]}, {"data": DataRecipe(domain=["sql", "maths"])}])
def test_an_unknown_domain_is_refused_at_once(make, recipe):
    with pytest.raises(UsageError, match="maths") as caught:
        make(**recipe)
    assert "math" in caught.value.message


def test_a_schedule_with_a_limit_is_refused(make):
    with pytest.raises(UsageError, match=r"leave out data\.limit"):
        make(DataRecipe(limit=4), schedule=["sql:2"])


def test_one_file_for_two_domains_is_refused(make, file):
    with pytest.raises(UsageError, match="one domain"):
        make(DataRecipe(prompts=file), schedule=["sql:2", "math:2"])


def test_too_many_rejected_lines_end_the_stream_early(make, monkeypatch):
    """Otherwise an invalid stream would wait for its first chunk forever."""
    garbage = Endless(line("a") + b"{\n" * 150)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=garbage))
    with pytest.raises(DataError, match="99 of 100 prompts rejected"):
        list(make(DataRecipe(prompts="-"), allowed=0.01).chunks())


def test_a_file_with_too_many_bad_lines_is_refused(make, tmp_path):
    """Before its first valid prompts are answered."""
    file = write(tmp_path / "p.jsonl", *(line(f"{n}") for n in range(50)), b"{\n")
    with pytest.raises(DataError, match="1 of 51 prompts rejected"):
        make(DataRecipe(prompts=file), allowed=0.01)


def test_a_truncated_stream_keeps_its_earlier_answers(make, monkeypatch, capsys):
    """The last of six lines was incomplete, and the answers and lessons of the others used to be lost."""
    lines = b"".join(line(f"{n}") for n in range(5)) + b'{"prompt": "ha'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    stream = make(DataRecipe(prompts="-"), allowed=0.01)
    assert len(domains(stream.chunks())) == 5
    assert "1 of 6 prompts rejected (<stdin>:6: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["-", "file"])
def test_a_single_bad_line_in_a_long_stream_is_tolerated(make, monkeypatch, tmp_path, source):
    """This holds for the first line too."""
    lines = b"{\n" + b"".join(line(f"{n}") for n in range(120))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    prompts = source if source == "-" else write(tmp_path / "p.jsonl", lines)
    stream = make(DataRecipe(prompts=prompts), allowed=0.01)
    assert len(domains(stream.chunks())) == 120
    assert (stream.rejections.count, stream.rejections.seen) == (1, 121)


@pytest.mark.parametrize("part", ["sql", "sql:", ":4", "sql:0", "sql:-1", "sql:many"])
def test_invalid_schedules_are_refused(part):
    with pytest.raises(ValidationError, match="is not NAME:PROMPTS"):
        StreamRecipe(schedule=["math:3", part])


def test_the_default_chunk_size_depends_on_the_family():
    recipe = StreamRecipe(schedule="sql:400, math:20")
    assert recipe.segments == [("sql", 400), ("math", 20)]
    assert (recipe.chunk_of("hydra"), recipe.chunk_of("eagle3"), recipe.chunk_of("lm")) == (80, 40, 40)
    assert StreamRecipe(chunk=3).chunk_of("hydra") == 3
