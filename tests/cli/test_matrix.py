"""`eval --matrix` and prompt files per domain on the command line: options, output and refusals."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.commands.eval import EvalResult
from specctl.measuring.lossless import Losslessness
from specctl.measuring.matrix import Matrix, Specialist
from specctl.measuring.records import SCHEMA, STAMP, recipe_stamp
from specctl.recipe import EvalRecipe

pytestmark = pytest.mark.usefixtures("four_layers")

MATRIX = Matrix(
    metric="mat",
    drafters=["sql-head", "math-head"],
    baselines=["lookup", "vanilla"],
    domains=["sql", "math"],
    values=[[3.0, 1.5], [1.2, 2.0], [1.4, 2.5], [1.0, None]],
    macro=[2.25, 1.6, 1.95, None],
    best=["sql-head", "math-head"],
    best_macro="sql-head",
    diagonal=[Specialist("sql-head", "sql", True, "math-head", 1.8, (1.1, 2.4))],
    verdict="diagonal: 1 of 1 specialist is the best",
)


@pytest.fixture
def pool(tmp_path):
    """Write the files of a pool that are read before loading; return the options to use it."""
    for name, domain in (("math-head", ["math"]), ("sql-head", ["sql"])):
        (tmp_path / "drafters" / name).mkdir(parents=True)
        (tmp_path / "drafters" / name / "config.json").write_text("{}")
        (tmp_path / "drafters" / name / "drafter.json").write_text(json.dumps({"domain": domain}))
    return ("--pool", "drafters", "--matrix")


@pytest.fixture
def answered(library):
    library("eval", lambda recipe, run: EvalResult([], Losslessness(), Losslessness(), rejected=0, matrix=MATRIX))


def test_the_matrix_is_shown_instead_of_the_list(specctl, pool, answered):
    done = specctl.ok("eval", *pool)
    lines = [line.split() for line in done.out.splitlines()]
    assert ["mat", "sql", "math", "macro"] in lines
    assert ["sql-head", "3.00*", "1.50", "2.25*"] in lines
    assert ["math-head", "1.20", "2.00*", "1.60"] in lines
    assert ["vanilla", "1.00", "–", "–"] in lines
    assert ["sql-head", "sql", "yes", "math-head", "+1.80", "+1.10", "…", "+2.40"] in lines
    assert MATRIX.verdict in done.out.splitlines()
    assert "better than every trained drafter: lookup in math" in done.out.splitlines()


def test_the_run_directory_holds_the_picture_and_the_table(specctl, pool, answered, tmp_path):
    document = specctl("eval", *pool, "--json").json
    assert document["matrix"]["values"] == MATRIX.values
    assert document["matrix"]["diagonal"][0]["interval"] == [1.1, 2.4]
    run = tmp_path / document["run_dir"]
    assert json.loads((run / "result.json").read_text())["matrix"] == document["matrix"]
    assert (run / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "matrix.csv").read_text().startswith("drafter,sql,math,macro\n")


def test_domains_default_to_those_of_the_pool(specctl, pool):
    def domains(*argv):
        return specctl("eval", *pool, *argv, "--dry-run", "--json").json["recipe"]["data"]["domain"]

    assert domains() == ["math", "sql"]
    assert domains("--domain", "chat,sql") == ["chat", "sql"]
    assert domains("data.domain=chat") == ["chat"]


@pytest.mark.parametrize("command", ["eval", "select"])
def test_a_domain_of_a_drafter_without_prompts_is_refused(specctl, pool, tmp_path, command):
    """The error said "unknown domain" of a name that the user had not typed."""
    (tmp_path / "drafters/sql-head/drafter.json").write_text('{"domain": ["traffic"]}')
    done = specctl(command, *(pool if command == "eval" else pool[:2]), "--dry-run")
    assert done.code == 2 and "drafters were made for traffic, which has no built-in prompts" in done.err


@pytest.mark.parametrize(
    ("argv", "left"),
    [(["none"], []), (["vanilla"], ["vanilla"]), (["vanilla,transformers"], ["vanilla", "transformers"])],
)
def test_baselines_can_be_chosen(specctl, argv, left):
    assert specctl("eval", "--baselines", *argv, "--dry-run", "--json").json["recipe"]["baselines"] == left


def test_an_override_can_remove_baselines(specctl):
    assert specctl("eval", "baselines=[]", "--dry-run", "--json").json["recipe"]["baselines"] == []


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--matrix"], 2, "needs drafters"),
        (["--pool", "drafters", "--matrix", "--metric", "matt"], 2, "did you mean mat?"),
        (["--pool", "drafters", "--matrix", "--metric", "speedup", "--baselines", "none"], 2, "vanilla"),
        (["--baselines", "vanila"], 2, "did you mean vanilla?"),
        (["--pool", "drafters", "--matrix", "--prompts", "{domain}.jsonl"], 3, "math.jsonl (math)"),
        (["--domain", "sql,math", "--prompts", "sql.jsonl"], 2, "one domain"),
        (["--domain", "sql,math", "--prompts", "-"], 2, "one domain"),
        (["--drafter", "lookup", "--matrix"], 2, "--domain"),
        (["--resume"], 2, "output_dir"),
        (["--resume", "--overwrite", "--output-dir", "out"], 2, "exclude"),
    ],
)
def test_impossible_requests_are_refused_before_loading(specctl, pool, tmp_path, argv, code, says):
    (tmp_path / "sql.jsonl").write_text('{"prompt": "Q"}\n')
    done = specctl("eval", *argv, "--dry-run")
    assert done.code == code, done.err
    assert says in done.err


def test_a_damaged_drafter_in_the_pool_is_named(specctl, pool, tmp_path):
    (tmp_path / "drafters/sql-head/drafter.json").write_text("{")
    done = specctl("eval", *pool, "--dry-run")
    assert done.code == 4
    assert "drafters/sql-head/drafter.json is not JSON" in done.err


@pytest.mark.parametrize("command", ["distill", "train-drafter", "eval"])
def test_prompts_files_per_domain_must_all_exist(specctl, tmp_path, command):
    argv = (command, "--domain", "sql,math", "--prompts", "{domain}.jsonl", "--dry-run")
    (tmp_path / "sql.jsonl").write_text('{"prompt": "Q"}\n')
    done = specctl(*argv)
    assert done.code == 3
    assert "math.jsonl (math)" in done.err and "sql.jsonl" not in done.err
    (tmp_path / "math.jsonl").write_text('{"prompt": "Q"}\n')
    assert specctl(*argv).code == 0


def test_resume_with_other_options_keeps_the_old_result(specctl, tmp_path, answered):
    out = tmp_path / "out"
    out.mkdir()
    stamp = json.dumps(recipe_stamp(EvalRecipe(limit=3)))
    pq.write_table(pa.Table.from_pylist([], schema=SCHEMA.with_metadata({STAMP: stamp})), out / "records.parquet")
    (out / "result.json").write_text("kept")
    done = specctl("eval", "--output-dir", "out", "--resume", "--limit", "4")
    assert done.code == 2
    assert "limit was 3, is 4" in done.err
    assert (out / "result.json").read_text() == "kept"
    assert specctl("eval", "--output-dir", "out", "--resume", "--limit", "3").code == 0
