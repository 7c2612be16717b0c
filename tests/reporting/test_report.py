"""The report of each command, from small run directories."""

import csv
import json
import math
from pathlib import Path

import pytest

from specctl import api
from specctl.errors import SpecctlError, UsageError
from specctl.lab.reason.run import Difference
from specctl.lab.reasoning.journal import ReasoningChunk
from specctl.lab.reasoning.rows import ModeRow
from specctl.measuring.online_rows import LearnerRow
from specctl.reporting import plots
from specctl.reporting.collect import RunRecord
from specctl.reporting.commands import online
from specctl.reporting.commands.selection import BINS, Rounds, read_rounds
from specctl.reporting.contents import records
from specctl.reporting.tables import headings
from tests.reporting.conftest import eval_row, filled

DOT = b"\x89PNG\r\n\x1a\n" + bytes(8) + (160).to_bytes(4) * 2


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Skip rendering, which takes most of the time; test_page.py renders every kind of picture."""
    monkeypatch.setattr(plots, "png", lambda figure: DOT)


def made(result):
    """Return the names of pictures and tables."""
    return [Path(path).name for path in result.pictures], [Path(path).name for path in result.tables]


def read_csv(result, name):
    path = next(path for path in result.tables if Path(path).name == name)
    return list(csv.reader(Path(path).open()))


def test_the_report_of_an_eval(eval_run):
    result = api.report([eval_run()], csv=True)
    pictures, tables = made(result)
    assert pictures == ["eval-mat.png", "eval-speedup.png", "eval-acceptance.png"]
    assert tables == ["eval-rows.csv", "eval-lossless.csv", "eval-acceptance.csv"]
    head, drafter, vanilla = read_csv(result, "eval-rows.csv")
    assert drafter[: head.index("mat, 95 %") + 1] == ["sql-head", "sql", "4", "2.0", "1.5;2.5"]
    assert vanilla[0] == "vanilla"
    # pooled over texts; depth 3 was offered only 5 times and is left out
    assert read_csv(result, "eval-acceptance.csv") == [["drafter", "1", "2", "3"], ["sql-head", "0.75", "0.15", ""]]


def test_a_report_is_not_written_into_a_drafter(eval_run, tmp_path):
    """Overwriting the drafter would delete it."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter/drafter.json").write_text("{}")
    with pytest.raises(UsageError, match="which is a drafter, and --overwrite"):
        api.report([eval_run()], tmp_path / "drafter/report")
    assert len(list((tmp_path / "drafter").iterdir())) == 1


def test_columns_without_a_value_are_left_out():
    """They were columns of dashes."""
    rows = [{"drafter": "a", "mat": None, "rate": math.nan, "kinds": [], "n": 0}]
    shown = records("rows", "Rows", rows, headings(*rows[0]))
    assert (shown.columns, shown.rows) == (["drafter", "n"], [["a", 0]])


def test_two_evals_are_compared(eval_run):
    runs = [eval_run("a", mat=2.0, recipe={"limit": 4}), eval_run("b", mat=3.0, recipe={"limit": 8})]
    result = api.report(runs, runs[0].parent / "out", csv=True)
    assert read_csv(result, "eval-mat.csv") == [
        ["drafter", "domain", "#1", "#2"],
        ["sql-head", "sql", "2.0", "3.0"],
        ["vanilla", "sql", "1.0", "1.0"],
    ]
    assert read_csv(result, "eval-recipes.csv") == [["", "#1", "#2"], ["limit", "4", "8"]]
    assert [row[0] for row in read_csv(result, "eval-rows.csv")[1:]] == [
        *("sql-head #1", "sql-head #2", "vanilla #1", "vanilla #2")
    ]


def test_rows_of_several_domains_give_a_heat_map(make_run):
    rows = [
        {"drafter": drafter, "domain": domain, "mat": mat}
        for drafter, mat in (("a", 2.0), ("b", 3.0), ("vanilla", 1.0))
        for domain in ("sql", "math")
    ]
    pictures, _ = made(api.report([make_run("e", "eval", {"rows": rows})]))
    assert pictures == ["eval-mat.png", "eval-matrix-mat.png"]


def test_the_headline_excludes_baselines(make_run):
    """Assisted decoding of transformers is a baseline and not a drafter of the pool."""
    rows = [
        {"drafter": name, "domain": "sql", "speedup": rate} for name, rate in (("a", 1.5), ("transformers+lookup", 2.0))
    ]
    page = Path(api.report([make_run("e", "eval", {"rows": rows})]).report).read_text()
    assert "best × plain: a" in page


def test_the_report_of_a_training(train_run):
    result = api.report([train_run()], csv=True)
    assert made(result)[0] == ["train-drafter-training.png", "train-drafter-acceptance.png"]
    assert read_csv(result, "train-drafter-checks.csv")[1:] == [
        ["sql-eagle3", "20", "2.25"],
        ["sql-eagle3", "40", "2.5"],
    ]


def test_an_unfinished_training_can_be_reported(train_run):
    run = train_run(finished=False, recipe={"arch": "eagle3", "data": "{domain: [sql, math]}"})
    result = api.report([run], csv=True)
    assert made(result)[0] == ["train-drafter-training.png", "train-drafter-acceptance.png"]
    head, row = read_csv(result, "train-drafter-trained.csv")
    known = dict(zip(head, row, strict=True))
    assert (known["drafter"], known["mat, prompts that chose it"], known["steps"]) == ("sql+math-eagle3", "2.5", "39")
    assert "no result.json" in result.notes[0]


def test_two_trainings_share_a_picture(train_run):
    result = api.report([train_run("a"), train_run("b")], train_run("c") / "out")
    assert made(result)[0] == ["train-drafter-training.png", "train-drafter-acceptance.png"]


def test_the_report_of_a_benchmark(make_run):
    decoding = [
        {"drafter": name, "batch": batch, "tokens_per_s": 100.0 * batch, "speedup": speedup}
        for name, speedup in (("vanilla", None), ("lookup", 1.5))
        for batch in (1, 8)
    ]
    steps = [{"rows": rows, "ours_ms": 1.0, "transformers_ms": 2.0, "weights_ms": 0.5} for rows in (1, 8)]
    run = make_run("b", "bench", {"decoding": decoding, "steps": steps})
    pictures, tables = made(api.report([run], csv=True))
    assert pictures == ["bench-decoding.png", "bench-steps.png"]
    assert tables == ["bench-decoding.csv", "bench-steps.csv"]


@pytest.mark.parametrize("weights", [True, False])
def test_the_report_of_a_selection(select_run, weights):
    result = api.report([select_run(weights=weights)], csv=True)
    assert [name.removeprefix("select-").removesuffix(".png") for name in made(result)[0]] == [
        *("regret", "best-arm", "policies", "pool-size", "rewards", "weights", "pulls")
    ]
    assert read_csv(result, "select-pulls.csv") == [
        ["domain", "sql-head", "lookup"],
        ["sql", "3", "3"],
        ["math", "2", "2"],
    ]
    head, first, _ = read_csv(result, "select-policies.csv")
    told = dict(zip(head, first, strict=True))
    assert told["95 %, high"] == "3.0"
    assert (told["reset"], told["seeds"], told["table, sha256"]) == ("query", "3", "ab12"), "a table that stands alone"
    assert read_csv(result, "select-domains.csv") == [["contender", "domain", "mat"], ["hedge", "sql", "2.0"]]


def test_a_selection_without_optional_results(make_run):
    result = {"algo": "hedge", "arms": ["a", "b"], "mat": 2.0}
    rounds = [{"arm": 1, "regret": 1.0}, {"arm": 0, "regret": None}]
    assert made(api.report([make_run("s", "select", result)])) == ([], [])
    pictures, _ = made(api.report([make_run("r", "select", result, rounds=rounds)]))
    assert pictures == ["select-weights.png", "select-pulls.png"]


@pytest.mark.parametrize("result", [{"algo": "hedge", "arms": ["a", "b"]}, None])
def test_rounds_of_several_policies_are_not_mixed(make_run, result):
    """All policies of a run write to one rounds.jsonl; weights and pulls come from the first policy."""
    rounds = [{"algo": name, "arm": arm} for name, arm in (("hedge", "a"), ("ucb", "b"), ("hedge", "a"), ("ucb", "b"))]
    found = api.report([make_run("s", "select", result, rounds=rounds)], csv=True)
    assert read_csv(found, "select-pulls.csv")[1][:2] == ["all", "2"]


def test_an_unfinished_selection_can_be_reported(make_run):
    """Without a result, the arms are known from the rounds only."""
    rounds = [{"arm": "a", "weights": None}, {"arm": "b", "weights": None}, {"arm": "b", "weights": None}]
    result = api.report([make_run("s", "select", None, rounds=rounds)], csv=True)
    assert made(result)[0] == ["select-weights.png", "select-pulls.png"]
    assert read_csv(result, "select-pulls.csv") == [["domain", "a", "b"], ["all", "1", "2"]]


def test_weights_belong_to_the_last_arms():
    """A policy without plain decoding, the first arm, gives one weight less."""
    rounds = Rounds(["vanilla", "a", "b"])
    rounds.add({"arm": "a"}, [0.75, 0.25])
    assert rounds.shares == [[0.0], [0.75], [0.25]]


def test_a_stopped_run_shows_its_plays(make_run):
    """Its weights have an order that no file names: `b` would get the weight of `a`."""
    rounds = [{"arm": arm, "weights": [0.9, 0.1]} for arm in "bba"]
    found = read_rounds(RunRecord(make_run("s", "select", None, rounds=rounds), "select", {}, {}, ""))
    assert found.arms == ["b", "a"] and not found.has_weights


@pytest.mark.parametrize("count", [1, 399, 400, 401, 3000])
def test_weights_of_many_rounds_are_averaged(count):
    rounds = Rounds(["a", "b"])
    for number in range(count):
        rounds.add({"arm": 0}, [number, 1.0])
    first, second = rounds.shares
    assert len(first) <= 2 * BINS
    assert second == pytest.approx([1.0] * len(second))
    complete = count // rounds.stretch  # the mean of the numbers of a stretch lies half a round before its middle
    assert first[:complete] == pytest.approx([middle - 0.5 for middle in rounds.middles[:complete]])


def test_the_report_of_an_online_run(make_run):
    """Each learner has a line, and a weights picture if it has members; contenders share a table."""
    seen = {"loss": 1.0, "tokens_per_s": 9.0, "static_mat": 1.5}
    weights = {"ogd": [1.0], "ens": [0.5, 0.5]}
    chunks = [{"algo": name, "mat": 2.0 + n, "weights": w, **seen} for n in range(3) for name, w in weights.items()]
    rows = [filled(LearnerRow, algo=name, mat=2.0, over_static_interval=[1.0, 1.25]) for name in (*weights, "static")]
    run = make_run("o", "online", {"algo": "ogd", "per_chunk": chunks, "learners": rows})
    result = api.report([run], run.parent / "out", csv=True)
    assert made(result)[0] == ["online-chunks.png", "online-weights-ens.png"]
    assert [row[0] for row in read_csv(result, "online-online.csv")] == ["contender", "ogd", "ens", "static"]
    assert read_csv(result, "online-chunks.csv")[1][:3] == ["ogd", "1", "2.0"]


def test_equal_static_curves_are_drawn_once():
    """Learners with the same start share the curve of the fixed drafter."""
    chunks = {name: [{"mat": 2.0, "static_mat": mat} for mat in (3.0, 1.0)] for name in ("ogd", "ens")}
    (line,) = online.static_curves(chunks)
    assert (line.name, line.y) == ("not learning", [3.0, 1.0])
    chunks["ens"][0]["static_mat"] = 2.0
    assert [line.name for line in online.static_curves(chunks)] == ["ogd, not learning", "ens, not learning"]
    for rows in chunks.values():
        rows[1]["untrained_mat"] = {"lookup": 2.5}
    rival = online.static_curves(chunks)[-1]
    assert rival.name == "lookup" and math.isnan(rival.y[0]) and rival.y[1] == 2.5


def test_online_and_reason_share_a_page(make_run):
    """A mode shows its agreement with the target alone."""
    rate = {"value": 0.25, "interval": [0.125, 0.5]}
    chunks = [filled(ReasoningChunk, mode=mode, chunk=n, avg_len=1.5) for n in (1, 2) for mode in ("target", "lr")]
    modes = [filled(ModeRow, mode=mode, prompts=4, agreement=rate) for mode in ("target", "lr")]
    gained = [filled(Difference, mode="osd-lr", than="lr", step_acceptance=rate)]
    steps = {"algo": "lr", "modes": modes, "per_chunk": chunks, "differences": gained}
    tokens = {"algo": "ogd", "per_chunk": [{"algo": "ogd", "mat": 2.0}, {"algo": "ogd", "mat": 2.5}]}
    runs = [make_run("t", "online", tokens), make_run("s", "reason", steps)]
    result = api.report(runs, runs[0].parent / "out", csv=True)
    assert made(result)[0] == ["online-chunks.png", "reason-steps.png"]
    heads = ["mode", "prompts", "answers of the target alone", "answers of the target alone, interval"]
    assert read_csv(result, "reason-modes.csv")[:2] == [heads, ["target", "4", "0.25", "0.125 to 0.5"]]
    assert read_csv(result, "reason-differences.csv")[1] == ["osd-lr − lr", "0.25", "0.125 to 0.5"]


def test_a_command_without_pictures_has_its_result_as_tables(make_run):
    runs = [
        make_run(name, "distill", {"responses": n, "by": [{"k": name, "v": {"w": n}}]}) for n, name in enumerate("ab")
    ]
    result = api.report(runs, runs[0].parent / "out", csv=True)
    assert ["responses", "0", "1"] in read_csv(result, "distill-result.csv")
    assert read_csv(result, "distill-by-2.csv") == [["k", "v.w"], ["b", "1"]]


def test_several_commands_share_a_page(eval_run, train_run):
    result = api.report([eval_run(), train_run()], eval_run("x") / "out")
    page = Path(result.report).read_text()
    assert "<h2>eval</h2>" in page and "<h2>train-drafter</h2>" in page
    assert len(result.pictures) == 5


@pytest.mark.parametrize("result", [{"rows": "x"}, {"rows": [1]}, {"rows": [{"drafter": "a"}]}, {"rows": {"a": 1}}])
def test_a_result_of_another_shape_is_an_error(make_run, result):
    with pytest.raises(SpecctlError, match="unexpected content in the files of eval"):
        api.report([make_run("e", "eval", result)])


def test_broken_records_only_lose_their_picture(eval_run):
    run = eval_run()
    (run / "records.parquet").write_bytes(b"PAR1 no")
    result = api.report([run])
    assert "eval-mat.png" in made(result)[0]
    assert "records.parquet cannot be read" in result.notes[0]


def test_a_run_with_only_a_result_is_reported(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"command": "distill", "responses": 3}))
    result = api.report([tmp_path])
    assert "there is no run.json" in result.notes[0]
    assert "<td>responses</td>" in Path(result.report).read_text()


@pytest.mark.parametrize("arm", [-1, 10**9, None, [1]])
def test_an_impossible_arm_is_an_error(make_run, arm):
    """A number in a file must not decide how much memory is allocated."""
    with pytest.raises(SpecctlError, match="unexpected content in the files of select"):
        api.report([make_run("s", "select", {"arms": ["a"]}, rounds=[{"arm": arm}])])


def test_unusable_speeds_are_not_in_headline_or_bars(make_run):
    """They stay in the table and its CSV file, with the reason."""
    rows = [eval_row("a", speedup=1.5), eval_row("b", mat=1.4, speedup=4.0, unusable="above its mat")]
    result = api.report(
        [make_run("e", "eval", {"rows": rows, "machine": {"cores": 2, "threads": 1, "others_busy": 1.9}})], csv=True
    )
    page = Path(result.report).read_text()
    assert "best × plain: a" in page and "4.00 !" in page
    assert any(
        "b in sql: above its mat" in note and "(2 cores, 1 thread, other processes kept 1.90 cores busy)" in note
        for note in result.notes
    )
    head, first, second = read_csv(result, "eval-rows.csv")
    assert (first[-1], second[-1]) == ("", "above its mat") and second[head.index("× plain")] == "4.0"
    with_one_bar = api.report([make_run("f", "eval", {"rows": rows[1:], "machine": ["odd"]})])
    assert "eval-speedup.png" not in made(with_one_bar)[0]


def test_serve_is_reported(make_run):
    row = {"drafter": "http://a", "texts": 3, "rounds": 4, "tokens": 9, "accepted": 5, "mat": 2.25}
    row |= {"share": 1.0, "engine": "vllm 0.32", "failures": 1, "broken": 2}
    facts = {"model": "toy", "choose": "cgp-ucb", "requests": 3, "tokens": 9, "mat": 2.25, "decide_us_p50": 80.0}
    result = api.report([make_run("s", "serve", facts | {"drafters": [row]})], csv=True)
    head, first = read_csv(result, "serve-drafters.csv")
    assert first[:4] == ["http://a", "vllm 0.32", "3", "1.0"] and first[head.index("streams broken off")] == "2"


def test_eval_of_servers_is_reported(make_run):
    """A sweep with two loads of a server, and its baseline without speedup and mat."""
    row = {
        "server": "server", "engine": "vllm 0.32", "domain": "sql", "concurrency": 1, "requests": 3, "tokens": 9,
        "tokens_per_s": 90.0, "request_tokens_per_s": 92.0, "first_token_s": 0.1, "first_token_p95_s": 0.2,
        "token_s": 0.01, "mat": 1.8, "mat_interval": [1.5, 2.0], "acceptance_by_position": [0.6, 0.2], "speedup": 1.3,
        "speedup_interval": None, "same_texts": 3, "failures": 0, "seconds": 1.0,
    }  # fmt: skip
    base = row | {
        "server": "baseline",
        "mat": None,
        "mat_interval": None,
        "acceptance_by_position": [],
        "speedup": None,
    }
    load = {"concurrency": 1, "mat": 1.8, "break_even": 1.4, "mats": [2.0, 3.0], "speedups": [1.4, 2.1]}
    length = {"server": "server", "concurrency": 1, "over": 0, "up_to": 512, "mat": 1.7, "requests": 3}
    rows = [one | {"concurrency": count} for one in (row, base) for count in (1, 8)]
    facts = {"servers": rows, "lengths": [length], "worth": [load], "rejected": 0, "later_turns": 0}
    result = api.report([make_run("swept", "eval-server", facts)], csv=True)
    pictures, tables = made(result)
    assert pictures == ["eval-server-load.png"]
    assert tables == [f"eval-server-{name}.csv" for name in ("servers", "lengths", "worth", "served-acceptance")]
    head, first, *_, last = read_csv(result, "eval-server-servers.csv")
    assert first[:4] == ["server, sql", "vllm 0.32", "sql", "1"] and last[head.index("in flight")] == "8"
    assert first[head.index("× baseline")] == "1.3" and last[head.index("mat")] == ""
    assert read_csv(result, "eval-server-worth.csv") == [
        ["run", "in flight", "mat", "even at mat", "× at mat 2", "× at mat 3"],
        ["as measured", "1", "1.8", "1.4", "1.4", "2.1"],
    ]
    assert read_csv(result, "eval-server-lengths.csv")[1] == ["server", "1", "0", "512", "3", "1.7"]


def test_learn_from_server_is_reported(make_run):
    sent = {"version": "v000002", "verdict": "published", "mat_before": 1.5, "mat_after": 1.9, "seconds": 1.0}
    chunk = {"version": "v000001", "prompts": 2, "status": "updated", "loss": 2.5, "mat": 1.5, "baseline_mat": 1.4}
    chunks = [{**chunk, "chunk": 1, "publication": sent}, {**chunk, "chunk": 2, "publication": None, "mat": None}]
    facts = {"algo": "ogd", "engines": ["vllm 0.32"], "mat": 1.5, "over_baseline": 1.07, "per_chunk": chunks}
    result = api.report([make_run("served", "learn-from-server", facts)], csv=True)
    pictures, tables = made(result)
    assert pictures == ["learn-from-server-served.png"] and tables == ["learn-from-server-served.csv"]
    head, first, second = read_csv(result, "learn-from-server-served.csv")
    assert first[head.index("published")] == "v000002" and first[head.index("mat, the drafter that stays")] == "1.4"
    assert second[head.index("verdict")] == "" and second[head.index("mat")] == ""
