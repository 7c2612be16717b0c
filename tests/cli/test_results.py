"""Printed results. They are built with the library's own dataclasses, so that a renamed field fails here."""

from dataclasses import asdict
from dataclasses import fields as fields_of

import pytest
from rich.console import Console

from specctl.commands.eval import EvalResult, LengthRow, Row
from specctl.commands.generate import GenerateResult, Piece
from specctl.commands.serve import ServedDrafter, ServeResult
from specctl.measuring.lossless import Losslessness


def filled(kind, **given):
    """Return a dataclass with None for every field not given."""
    return kind(**{field.name: given.get(field.name) for field in fields_of(kind)})


def test_eval_prints_rows_and_both_verdicts(specctl, library):
    row = filled(Row, drafter="lookup", domain="sql", mat=1.54, speedup=1.31, tokens=1234, target_passes=800)
    compared, not_compared = Losslessness(sequences=9, mismatches=0, ties=1), Losslessness(0, 0, 0)
    library("eval", lambda recipe, run: EvalResult([row], compared, not_compared, rejected=0))
    done = specctl.ok("eval", "--drafter", "lookup")
    shown = next(line for line in done.out.splitlines() if "lookup" in line).split()
    assert shown == ["lookup", "sql", "1.54", "1.31", "1,234"]
    assert "× plain" in done.out and "× transformers" not in done.out, "a column of dashes"
    assert "0 mismatches, 1 ties in 9 sequences" in done.out
    assert "transformers: not compared" in done.out


def test_generate_prints_the_text_and_its_numbers(specctl, library):
    pieces = [Piece("SELECT [a]", False), Piece(" FROM t", True)]
    result = filled(GenerateResult, prompt="Q", text="SELECT [a] FROM t", tokens=5, mat=2.5, pieces=pieces)
    library("generate", lambda recipe, run: result)
    lines = specctl("generate", "Q").out.splitlines()
    assert lines[0] == "SELECT [a] FROM t"
    assert ["mat", "2.50"] in [line.split() for line in lines]
    assert specctl("generate", "Q", "-q").out == "SELECT [a] FROM t\n"


def test_a_prompt_that_is_the_name_of_a_file_is_reported(specctl, library, tmp_path):
    """The answer was about the name, and nothing said so."""
    (tmp_path / "prompt.txt").write_text("Q")
    library("generate", lambda recipe, run: filled(GenerateResult, prompt=recipe.prompt, text="A", pieces=[]))
    assert "specctl generate - < prompt.txt" in specctl.ok("generate", "prompt.txt").err
    assert not specctl.ok("generate", "prompt").err


def test_unusable_speeds_are_marked_and_explained_once(specctl, library):
    """On a busy machine times are meaningless, but mat stays valid. Usable rows are unchanged."""
    numbers = {"mat": 1.46, "speedup": 2.53, "tokens": 10, "unusable": "above its mat"}
    rows = [filled(Row, drafter="head", domain="sql", **numbers), filled(Row, drafter="lookup", speedup=1.31)]
    none, lengths = Losslessness(0, 0, 0), [filled(LengthRow, drafter="head", domain="sql", up_to=512, **numbers)]
    library("eval", lambda recipe, run: EvalResult(rows, none, none, rejected=0, lengths=lengths))
    lines = specctl("eval", "--drafter", "lookup").out.splitlines()
    assert next(line for line in lines if "head" in line).split()[2:5] == ["1.46", "2.53", "!"]
    assert next(line for line in lines if "lookup" in line).split()[1:] == ["–", "–", "1.31", "–"]
    assert next(line for line in lines if "512" in line).split()[1:5] == ["512", "1.46", "2.53", "!"]
    (told,) = [line for line in lines if line.startswith("!")]
    assert told.startswith("! speeds that cannot be used: head in sql: above its mat (")
    assert "cores busy), or there were too few tokens: measure again" in told
    assert any(line.startswith("measured on: ") and "test prompts per domain (sql), greedy" in line for line in lines)
    for name in ("first", "second"):
        rows.append(filled(Row, drafter=name, domain="sql", **numbers | {"unusable": "its interval is wide"}))
    told = next(line for line in specctl("eval", "--drafter", "lookup").out.splitlines() if line.startswith("!"))
    assert "head in sql: above its mat; first in sql, second in sql: its interval is wide (a draft that costs" in told
    rows[:] = rows[1:2]
    lengths.clear()
    assert "cannot be used" not in specctl("eval", "--drafter", "lookup").out
    assert specctl("eval", "--drafter", "lookup", "--json").json["rows"][0]["unusable"] is None


@pytest.mark.parametrize(("engine", "title"), [("vllm", "server"), (None, "drafter")])
def test_the_table_of_serve_calls_servers_by_their_name(capsys, engine, title):
    """Addresses of servers stood below "drafter"."""
    from specctl.cli.serve import show

    row = filled(ServedDrafter, drafter="http://a", texts=1, rounds=1, tokens=2, accepted=1, engine=engine)
    numbers = {"requests": 1, "tokens": 2, "seconds": 1.0, "learning_by_drafter": {}}
    Console(width=200).print(show(asdict(filled(ServeResult, drafters=[row], **numbers)) | {"run_dir": "run"}))
    assert capsys.readouterr().out.split()[0] == title


def test_a_speed_bound_is_explained_only_if_there_is_one():
    """`serve` used to explain bounds after runs too short to have one."""
    from specctl.cli.serve import certain

    document = {"at_least": "at least: holds with …", "speed_at_least": None}
    assert certain(document) == ["× plain: no bound yet"]
    assert certain(document | {"speed_at_least": 1.5}) == ["× plain: at least 1.50", document["at_least"]]
