"""Prompt files in many formats are read, and invalid lines are rejected with a reason."""

import csv
import functools
import gzip
import io
import json
import signal
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import progress
from specctl.distillation import line_streams, prompts
from specctl.distillation.line_streams import open_prompts
from specctl.distillation.messages import prompt_id
from specctl.distillation.prompts import HUB, check_files, prompts_of_row, read_domains, read_prompts
from specctl.distillation.rejections import Rejections
from specctl.errors import DataError, Interrupted, UsageError
from specctl.recipe import DataRecipe

GOOD = b'{"prompt": "Which planet is the largest?"}'
BAD = {
    b'{"prompt": ': "not JSON",
    b'["prompt"]': "expected a JSON object, got list; if the file is a JSON array, `jq -c '.[]'`",
    b"[": "the line alone is not JSON; if the file is a JSON array, `jq -c '.[]'`",
    b"\x1f\x8b\x08\x00": "`gunzip -c`",
    b"\x28\xb5\x2f\xfd": "`unzstd -c`",
    b'"prompt"': "expected a JSON object, got str",
    b'{"prompt": 3}': "`prompt` must be a string, got int",
    b'{"prompt": ""}': "empty prompt",
    b'{"prompt": " \\n "}': "empty prompt",
    b'{"prompt": "a\\u0000b"}': "NUL",
    b'{"prompt": "\\ud800"}': "surrogate",
    b'{"prompt": "\xff\xfe"}': "not UTF-8 at byte 12",
    b"\x00\x00": "not JSON",
    b'{"question": "x"}': "needs `prompt`, `messages`, `turns`, `conversations` or `instruction`, but has `question`",
    b'{"prompt": "x", "messages": [{"role": "user", "content": "y"}]}': "has both",
    b'{"prompt": []}': "`prompt` must be a non-empty list",
    b'{"prompt": [{"text": "x"}]}': "`role` and `content`",
    b'{"input": [], "output": ""}': "empty prompt",
    b'{"messages": []}': "non-empty list",
    b'{"messages": "x"}': "non-empty list",
    b'{"messages": ["x"]}': "`role` and `content`",
    b'{"messages": [{"role": "user"}]}': "`role` and `content`",
    b'{"messages": [{"role": "robot", "content": "x"}]}': "unknown role 'robot'",
    b'{"messages": [{"role": ["user"], "content": "x"}]}': "unknown role",
    b'{"messages": [{"role": "user", "content": null}]}': "content must be a string, got NoneType",
    b'{"messages": [{"role": "assistant", "content": "x"}]}': "does not end with a user message",
    b'{"messages": [{"role": "system", "content": "x"}]}': "does not end with a user message",
    b"[" * 100_000: "nested too deeply",
    b"9" * 5000: "",
    GOOD[:-2] + b"x" * line_streams.MAX_LINE_BYTES + b'"}': "longer than 8 MiB",
}


def parse_line(line, *place, **options):
    """Return the only prompt of a line."""
    (prompt,) = prompts_of_row(line_streams.json_object(line), *place, **options)
    return prompt


def data(path, **fields) -> DataRecipe:
    return DataRecipe(prompts=str(path), **fields)


def write(path, *lines: bytes):
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line[:40]))
def test_bad_lines_are_kept_with_place_and_reason(line, tmp_path):
    file, rejected = write(tmp_path / "p.jsonl", GOOD, line, GOOD), tmp_path / "rejected.jsonl"
    prompts = read_prompts(data(file, max_rejected=1.0), "sql", rejected_to=rejected)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Which planet is the largest?"]
    (row,) = map(json.loads, rejected.read_text().splitlines())
    assert row["where"] == f"{file}:2"
    assert BAD[line] in row["reason"]
    assert len(row["text"]) <= 200


TEXTS = ["Which planet is the largest?", 'caf\u00e9, "au lait"; two\tcups']
ALPACA = {"instruction": "Translate.", "input": "Bonjour", "output": "Hello"}


def csv_file(path, rows, delimiter=",", **encoding):
    with path.open("w", newline="", **encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def parquet_file(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


FORMATS = {
    "p.txt": lambda path, rows: path.write_text("\ufeff" + "\r\n\r\n".join(row["prompt"] for row in rows)),
    "lines.txt": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
    "p.csv": csv_file,
    "excel.csv": functools.partial(csv_file, delimiter=";", encoding="utf-8-sig"),
    "p.tsv": functools.partial(csv_file, delimiter="\t"),
    "bars.csv": functools.partial(csv_file, delimiter="|"),
    "p.parquet": parquet_file,
}


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_give_the_same_prompts(name, tmp_path):
    """Plain text, CSV and Parquet files used to be refused line by line."""
    FORMATS[name](tmp_path / name, [{"prompt": text, "license": None} for text in TEXTS])
    read = read_prompts(data(tmp_path / name), "sql")
    assert [prompt.messages for prompt in read] == [[{"role": "user", "content": text}] for text in TEXTS]
    assert read[0].where.endswith(f"{name}:1") and {prompt.license for prompt in read} == {None}


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "lines.txt"])
def test_alpaca_and_messages_in_other_formats(name, tmp_path):
    chat = json.dumps([{"role": "user", "content": TEXTS[1]}])
    rows = [ALPACA | {"messages": None}, dict.fromkeys(ALPACA) | {"messages": chat}]
    FORMATS[name](
        tmp_path / name, [{key: cell for key, cell in row.items() if cell or name != "lines.txt"} for row in rows]
    )
    alpaca, other = read_prompts(data(tmp_path / name), "sql")
    assert alpaca.messages == [{"role": "user", "content": "Translate.\n\nBonjour"}] and alpaca.reference == "Hello"
    assert other.messages == [{"role": "user", "content": TEXTS[1]}]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda asked: {"request": asked, "response": {"choices": []}},
        lambda asked: {"request": json.dumps(asked)},
        lambda asked: {"request": {"body": asked}},
        lambda asked: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked},
    ],
)
def test_logged_requests_are_prompts(wrap):
    """`eval` used to refuse the log from which `distill --from-log` had made the training data."""
    asked = {"model": "m", "messages": [{"role": "user", "content": TEXTS[0]}], "tools": [{"name": "look_up"}]}
    (prompt,) = prompts_of_row(wrap(asked), "sql")
    assert prompt.messages == asked["messages"] and prompt.tools[0]["function"]["name"] == "look_up"
    (plain,) = prompts_of_row({"messages": asked["messages"], "tools": asked["tools"]}, "sql")
    assert prompt.id == plain.id
    for bad in ({"request": "x{"}, {"request": {"prompt": "x"}}, {"request": None}, {"body": "Dear all,"}):
        with pytest.raises(ValueError, match=r"not JSON|non-empty list|has no `request`|but has `body`"):
            prompts_of_row(bad, "sql")


def test_binary_cells_are_read_as_text(tmp_path):
    """Some writers do not mark string columns as UTF-8."""
    pq.write_table(pa.table({"prompt": pa.array([TEXTS[1].encode()], pa.binary())}), tmp_path / "p.parquet")
    (prompt,) = read_prompts(data(tmp_path / "p.parquet"), "sql")
    assert prompt.messages == [{"role": "user", "content": TEXTS[1]}]


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("p.parquet", b"PAR1, or not", "as Parquet"),
        ("p.parquet", b"PAR1" + bytes(20) + b"\x09\0\0\0PAR1", "as Parquet: OSError Couldn't deserialize thrift"),
        ("p.csv", b'prompt\n"' + b"x" * (line_streams.MAX_LINE_BYTES + 9), "as CSV: field larger"),
        ("p.csv", b"prompt\ncaf\xe9\n", "as CSV: not UTF-8"),
        ("p.csv", b"prompt\nplain\nHello, world\n", "line 3 has more cells than the header"),
        ("p.csv", b'id,prompt\n1,"Hello\n2,there\n', "as CSV: unexpected end of data"),
        ("p.csv", b'prompt\n"say \\"hi\\", please"\n', "as CSV: ',' expected after"),
        ("p.csv", b"frage,antwort\nx,y\n", "but has `frage`, `antwort`"),
        ("p.txt", b'[\n{"prompt": "x"}\n]', "JSON array"),
        ("p.txt", b'[{"prompt": "x"}]', "JSON array"),
        ("p.txt", b"caf\xe9\n", "not UTF-8 at byte 3"),
        ("p.txt", b"\x1f\x8b\x08\x00", "compressed: `gunzip`"),
        ("p.csv", b"", "no prompts in"),
        ("p.txt", b"\n\n", "no prompts in"),
    ],
)
def test_a_damaged_file_is_named(name, contents, said, tmp_path):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError) as refused:
        read_prompts(data(tmp_path / name), "sql")
    assert said in str(refused.value) and refused.value.hint
    assert str(refused.value).isprintable() or name != "p.parquet"  # one line


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_give_a_prompt_or_a_reason(line):
    try:
        assert parse_line(line, "sql").messages
    except ValueError as error:
        assert str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["prompt", "messages", "role", "content", "extra"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "response", "extra"]), json_values))
@settings(max_examples=150, deadline=None)
def test_arbitrary_objects_give_a_prompt_or_a_reason(row):
    try:
        prompt = parse_line(json.dumps(row).encode(), "sql")
    except ValueError as error:
        assert str(error)
    else:
        assert all(message.keys() == {"role", "content"} and message["content"].strip() for message in prompt.messages)


@given(st.lists(st.sampled_from([GOOD, *[line for line in BAD if len(line) < 100], b"", b"  "]), max_size=30))
@settings(max_examples=50, deadline=None)
def test_every_line_is_a_prompt_or_a_rejection(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("corpus")
    rejections = Rejections(folder / "rejected.jsonl", 1.0)
    try:
        prompts = read_prompts(data(write(folder / "p.jsonl", *lines)), "sql", rejected_to=rejections)
    except DataError:
        prompts = []
    assert len(prompts) == (GOOD in lines)
    assert rejections.count == sum(line in BAD for line in lines)
    assert rejections.seen == sum(bool(line.strip()) for line in lines)


def test_too_many_rejections_are_an_error_with_the_first_reasons(tmp_path):
    file = write(tmp_path / "p.jsonl", *[GOOD] * 98, b"{", b"[]")
    with pytest.raises(DataError) as caught:
        read_prompts(data(file), "sql", rejected_to=tmp_path / "rejected.jsonl")
    assert "2 of 100" in caught.value.message and f"{file}:99: not JSON" in caught.value.message
    assert "rejected.jsonl" in caught.value.hint and '{"prompt"' in caught.value.hint
    assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("lines", [[GOOD, b"{"], [GOOD]])
def test_earlier_rejections_stay_until_they_are_replaced(tmp_path, lines):
    """A command that is refused later must not delete them; held rejections are written when it starts."""
    kept, file = tmp_path / "rejected.jsonl", write(tmp_path / "p.jsonl", *lines)
    kept.write_text("earlier\n")
    refused = Rejections(kept, 0.0, hold=True)
    refused.seen = 1
    refused.add("p:1", "not JSON")
    with pytest.raises(DataError) as caught:
        refused.check()
    assert kept.read_text() == "earlier\n" and "rejected.jsonl" not in caught.value.hint
    rejections = Rejections(kept, 1.0, hold=True)
    read_prompts(data(file), "sql", rejected_to=rejections)
    assert kept.read_text() == "earlier\n"
    rejections.release()
    rejections.release()
    assert kept.exists() == (len(lines) > 1)
    rejections.add("p:9", "later")
    wheres = [json.loads(line)["where"] for line in kept.read_text().splitlines()]
    assert wheres == [f"{file}:2"] * (len(lines) - 1) + ["p:9"]


def test_tolerated_rejections_are_one_line_on_stderr(tmp_path, capsys):
    file = write(tmp_path / "p.jsonl", *[GOOD] * 99, b"{")
    assert len(read_prompts(data(file), "sql")) == 1
    read_prompts(data(write(tmp_path / "two.jsonl", GOOD, GOOD)), "sql")
    stderr = capsys.readouterr().err
    assert "1 of 100 prompts rejected" in stderr and "98 repeated prompts of" in stderr
    assert "1 repeated prompt of sql left out" in stderr


def test_an_absent_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no prompts file"):
        read_prompts(data(tmp_path / "absent.jsonl"), "sql")


def test_an_unreadable_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot read prompts") as caught:
        read_prompts(data(tmp_path), "sql")
    assert caught.value.hint == "give a file of prompts, or - for stdin"


def test_the_rejections_file_is_private(tmp_path):
    """It quotes private texts, and must not be written through a link."""
    kept = tmp_path / "rejected.jsonl"
    for hold in (False, True):
        rejections = Rejections(kept, 1.0, hold=hold)
        rejections.add("p:1", "not JSON", "hunter2")
        rejections.release()
        assert kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    kept.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="a symbolic link"):
        rejections.add("p:1", "not JSON", "hunter2")
    assert not (tmp_path / "victim").exists()


def test_a_device_is_not_a_prompt_file():
    with pytest.raises(DataError, match="cannot read prompts from /dev/zero: a device"):
        open_prompts("/dev/zero")


def test_waiting_for_a_pipe_can_be_interrupted(tmp_path, pipe):
    """Opening a pipe without a writer would block signals."""
    pipe(tmp_path / "pipe")
    progress.interrupts.handle(signal.SIGTERM)
    try:
        with open_prompts(str(tmp_path / "pipe")) as file, pytest.raises(Interrupted):
            file.readline()
    finally:
        progress.interrupts.reset()


def test_a_pipe_is_read_to_its_end(tmp_path, pipe):
    pipe(tmp_path / "pipe")
    writer = subprocess.Popen(["sh", "-c", "printf 'a\\nb\\n' > pipe"], cwd=tmp_path)
    with open_prompts(str(tmp_path / "pipe")) as file:
        assert file.read() == b"a\nb\n"
    assert writer.wait() == 0


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no prompts in"):
        read_prompts(data(write(tmp_path / "p.jsonl", b"", b"")), "sql")


def test_prompts_are_read_from_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xef\xbb\xbf" + GOOD + b"\r\n")))
    (prompt,) = read_prompts(data("-"), "legal")
    assert (prompt.domain, prompt.where) == ("legal", "<stdin>:1")


def test_domains_are_read_from_their_files(tmp_path):
    for domain in ("sql", "math"):
        write(tmp_path / f"{domain}.jsonl", b'{"prompt": "about %s"}' % domain.encode())
    wanted = data(tmp_path / "{domain}.jsonl", domain=["math", "sql"])
    found = read_domains(wanted, Rejections(None, 0))
    assert [(prompt.domain, prompt.messages[0]["content"]) for prompt in found] == [
        *(("math", "about math"), ("sql", "about sql"))
    ]
    assert found[0].where == f"{tmp_path / 'math.jsonl'}:1"


def test_every_missing_file_is_named_before_reading(tmp_path):
    write(tmp_path / "sql.jsonl", b"not looked at")
    with pytest.raises(DataError) as caught:
        read_domains(data(tmp_path / "{domain}.jsonl", domain=["sql", "math", "chat"]), Rejections(None, 0))
    assert "math.jsonl (math)" in caught.value.message and "chat.jsonl (chat)" in caught.value.message
    assert "sql.jsonl" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no prompts in"),
        (b"\xff\xfe", r"p\.jsonl:1: UTF-16, not UTF-8"),
        (gzip.compress(GOOD, mtime=0), r"p\.jsonl:1: compressed: `gunzip`"),
        (b'{"prompt":"\x01"}\n', "Invalid control character at column 12"),
        (None, "p.jsonl is a directory"),
    ],
)
def test_invalid_prompt_files_are_refused_before_a_model_loads(content, said, tmp_path):
    """--dry-run used to accept them, and the run loaded the target first."""
    file = tmp_path / "p.jsonl"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        check_files(data(file))


@pytest.mark.parametrize("prompts", [HUB, f"{HUB}:config"])
def test_a_data_set_without_a_name_is_refused(prompts):
    """The library's IndexError came with the advice to look at the network."""
    with pytest.raises(UsageError, match=f"{prompts} names no data set"):
        check_files(data(prompts))


def test_a_file_with_one_valid_prompt_is_accepted(tmp_path):
    check_files(data(write(tmp_path / "p.jsonl", b"{", b"[]", GOOD)))


def test_a_domain_without_prompts_is_named(tmp_path):
    write(tmp_path / "sql.jsonl", GOOD)
    write(tmp_path / "math.jsonl")
    with pytest.raises(DataError, match=r"no prompts in .*math\.jsonl"):
        read_domains(data(tmp_path / "{domain}.jsonl", domain=["sql", "math"]), Rejections(None, 0))


@pytest.mark.parametrize("name", ["-", "p.jsonl"])
def test_one_source_for_two_domains_is_refused(name):
    with pytest.raises(UsageError, match="one domain") as caught:
        read_domains(data(name, domain=["sql", "math"]), Rejections(None, 0))
    assert "{domain}" in caught.value.hint


def test_a_limit_stops_reading_stdin(monkeypatch):
    """A stream may never end."""
    lines = b"".join(line + b"\n" for line in (GOOD, GOOD, b'{"prompt": "b"}', b"{"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    assert [prompt.messages[0]["content"][0] for prompt in read_prompts(data("-", limit=2), "sql")] == ["W", "b"]


def test_a_limit_samples_the_whole_file(tmp_path):
    """Independently of its order; the sample of a smaller limit is a prefix of a larger one."""
    file = write(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"{n:04}"}).encode() for n in range(500)))

    def drawn(**options):
        return [prompt.messages[0]["content"] for prompt in read_prompts(data(file, **options), "sql", sample=True)]

    few, many = drawn(limit=20), drawn(limit=60)
    assert len(set(many)) == 60 and few == many[:20]
    assert sum(int(text) < 250 for text in many) in range(10, 51)  # binomial(60, 1/2): outside once in 1e7
    assert few != drawn(limit=20, seed=1) and len(drawn(limit=900)) == 500
    assert [p.messages[0]["content"] for p in read_prompts(data(file, limit=2), "sql")] == ["0000", "0001"]


def test_messages_and_references_are_read():
    turns = [{"role": r, "content": c} for r, c in [("system", "s"), ("user", "q"), ("assistant", "a")]]
    prompt = parse_line(json.dumps({"messages": turns, "id": 7}).encode(), "chat")
    assert prompt.messages == turns[:2] and prompt.reference == "a"
    assert parse_line(b'{"prompt": "q", "response": "a"}', "chat").reference == "a"
    extra = [{**turn, "weight": 1} for turn in turns[:2]]
    assert parse_line(json.dumps({"messages": extra}).encode(), "chat").id == prompt.id


def test_ids_are_stable_across_versions():
    assert prompt_id([{"role": "user", "content": "é"}]) == "5b982d5fb9bbb395dedf893373894ed3"


def test_overlong_lines_do_not_fill_the_memory(tmp_path):
    file = write(tmp_path / "p.jsonl", *[b'{"prompt": "' + b"x" * 10_000_000 + b'"}'] * 3, GOOD)
    tracemalloc.start()
    rejections = Rejections(None, 1.0)
    assert len(read_prompts(data(file), "sql", rejected_to=rejections)) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rejections.count == 3 and peak < 4 * line_streams.MAX_LINE_BYTES


def test_generator_prompts_are_distinct_and_repeatable():
    first = read_prompts(DataRecipe(limit=20, seed=1), "sql")
    assert [prompt.id for prompt in first] == [
        prompt.id for prompt in read_prompts(DataRecipe(limit=20, seed=1), "sql")
    ]
    assert len({prompt.id for prompt in first}) == 20
    held_out = read_prompts(DataRecipe(limit=20, seed=1), "sql", split="test")
    assert not {prompt.id for prompt in first} & {prompt.id for prompt in held_out}


def test_an_unknown_domain_without_a_file_is_refused():
    with pytest.raises(UsageError, match="sql"):
        read_prompts(DataRecipe(), "sqll")


def test_unconditional_samples_have_no_prompt_and_a_seed_each():
    data = DataRecipe(source="unconditional", limit=5)
    prompts = read_prompts(data, "unconditional")
    assert data.domain == ["unconditional"]
    assert len({prompt.id for prompt in prompts}) == 5 and all(not prompt.messages for prompt in prompts)
    assert prompts == read_prompts(data, "unconditional")


def test_a_document_starts_like_a_chat(target):
    opening = target.document_start()
    assert target.tokenizer.decode(opening) == "<|user|>\n"


MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."], "reference": []}
SPEED_BENCH = {
    **{"question_id": "q1", "category": "coding", "sub_category": "", "turns": ["Sort a list."]},
    **{"source": "s", "src_id": "7", "difficulty": "easy", "multiturn": False},
}


def row(fields) -> bytes:
    return json.dumps(fields).encode()


def test_a_suite_row_is_a_conversation_of_its_category():
    prompt = parse_line(row(MT_BENCH), "question", suite=True)
    assert (prompt.domain, prompt.later_turns) == ("writing", ("Rewrite it.",))
    assert prompt.messages == [{"role": "user", "content": "Compose a post."}]
    other = parse_line(row(MT_BENCH | {"turns": ["Compose a post.", "Translate it."]}), "question", suite=True)
    assert other.id != prompt.id, "conversations that begin alike were kept once"
    single = parse_line(row(SPEED_BENCH), "x", suite=True)
    assert (single.domain, single.later_turns) == ("coding", ())
    assert single.id == parse_line(row({"prompt": "Sort a list."}), "x").id
    assert parse_line(row({"turns": ["a"]}), "x", suite=True).domain == "x"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"turns": []}, "`turns` must be a non-empty list"),
        ({"turns": "a"}, "`turns` must be a non-empty list"),
        ({"turns": ["a", 3]}, "content must be a string, got int"),
        ({"turns": ["a", " "]}, "empty prompt"),
        ({"category": 3}, "`category` must be a name, got 3"),
        (
            {"turns": [f"{prompts.PLACEHOLDER} (x)"]},
            "a placeholder: fetch the text of this row with SPEED-Bench's script",
        ),
    ],
)
def test_invalid_suite_rows_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        parse_line(row(MT_BENCH | fields), "x", suite=True)


def test_commands_without_conversations_refuse_several_turns(tmp_path):
    """Otherwise they would silently use the first turns alone."""
    file = write(tmp_path / "question.jsonl", row(SPEED_BENCH), row(MT_BENCH))
    with pytest.raises(DataError, match=r"question.jsonl:2: has 2 turns; only `specctl eval` supports"):
        read_prompts(data(file), "question")
    (prompt,) = read_prompts(data(file, max_rejected=0.5), "question")
    assert prompt.domain == "question", "a category that no option has named"


def test_the_limit_of_a_suite_applies_per_category(tmp_path):
    """A sample of the whole file had one prompt of some categories and missed other categories."""
    lines = [row({"category": kind, "turns": [f"{kind} {n}"]}) for kind in ("qa", "rag", "math") for n in range(40)]
    file = write(tmp_path / "question.jsonl", *lines)
    found = read_prompts(data(file, limit=3), "question", sample=True, suite=True)
    assert [prompt.domain for prompt in found] == ["qa"] * 3 + ["rag"] * 3 + ["math"] * 3
    more = read_prompts(data(file, limit=5), "question", sample=True, suite=True)
    assert found[:3] == more[:3], "a smaller limit is no longer the beginning of a larger one"


def test_a_prompt_beside_its_messages_is_read_once():
    """Every row of UltraChat repeats the first message as `prompt`, and used to be refused."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    prompt = parse_line(row({"prompt": "Hi", "messages": messages}), "chat")
    assert (prompt.messages, prompt.reference) == (messages[:1], "Hello.")


def test_a_hub_data_set_is_read(tmp_path):
    """A local directory takes the place of the hub. `distill` used to train on the test split, which `eval` reads."""
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", row(SPEED_BENCH | {"turns": ["of the training split"]}))
    write(tmp_path / "set" / "test.jsonl", row(SPEED_BENCH), row(SPEED_BENCH | {"turns": [""]}))
    recipe = data(f"{HUB}{tmp_path / 'set'}", max_rejected=0.5)
    check_files(recipe)
    (prompt,) = read_prompts(recipe, "set", split="test", suite=True)
    assert prompt.messages[0]["content"] == "Sort a list." and prompt.where.endswith("set:1")
    (prompt,) = read_prompts(recipe, "set", suite=True)
    assert prompt.messages[0]["content"] == "of the training split"


def test_the_only_split_of_a_data_set_serves_training_and_test(tmp_path):
    write(tmp_path / "validation.jsonl", row({"prompt": "Hi"}))
    for split in ("train", "test"):
        assert len(read_prompts(data(f"{HUB}{tmp_path}"), "set", split=split)) == 1


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"a.jsonl": [GOOD], "b.jsonl": [b'{"question": "a"}']},
            r"cannot load .*: CastError: .*column names don't match",
        ),
        ({"a.jsonl": [GOOD, b'{"promp']}, "cannot load .*: JSON parse error"),
        ({"test.jsonl": []}, "has no rows"),
        ({"train.jsonl": [GOOD], "test.jsonl": []}, "cannot load .*corresponds to no data"),
    ],
)
def test_a_broken_data_set_is_an_error_with_its_cause(tmp_path, files, says):
    """It used to raise DatasetGenerationError or StopIteration without the cause."""
    for name, lines in files.items():
        (tmp_path / name).write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=says):
        read_prompts(data(f"{HUB}{tmp_path}"), "x")


def test_an_error_while_reading_rows_is_reported(monkeypatch):
    def rows():
        yield {"prompt": "a"}
        raise ImportError("To support decoding images, please install 'Pillow'.")

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"test": rows()})
    with pytest.raises(DataError, match="cannot load the data set x: ImportError: To support decoding images"):
        read_prompts(data(f"{HUB}x"), "x")


def test_earlier_thinking_is_kept():
    turns = [{"role": r, "content": c} for r, c in [("user", "q"), ("assistant", "a"), ("user", "r")]]
    turns[1]["reasoning"] = "hm"
    (_, said, _) = parse_line(json.dumps({"messages": turns}).encode(), "chat").messages
    assert said == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_a_missing_data_set_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot load the data set"):
        read_prompts(data(f"{HUB}{tmp_path / 'nothing'}"), "x")
