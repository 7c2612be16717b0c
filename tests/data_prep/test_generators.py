"""Offline prompt generators: reproducible, distinct, with disjoint splits, and in known forms."""

import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
from specctl.data_prep import DOMAINS, Domain, PromptsExhausted, UnknownDomain, get
from specctl.data_prep.sql import identifier

from specctl.errors import UsageError

NAMES = ("sql", "code", "math", "medical", "biochem", "summarization", "chat")
REAL = Path(__file__).parents[3] / "shared" / "data"

# minimal share of prompts per domain that match each regular expression, by the layouts of the real prompts
FORMS = {
    "sql": {
        r"Given the table and its columns, write one SQL query that answers the question\.\n\n"
        r"Table: 1-\d{6,8}-\d+\nColumns: .+\n\nQuestion: .+$": 0.15,
        r"Given the database schema, write one SQL query that answers the question\.\n\n"
        r"Schema:\nCREATE TABLE table_[12]_\d{6,8}_\d+ \(.+\);\n\nQuestion: .+$": 0.4,
        r"Given the database schema, write one SQL query that answers the question\.\n\n"
        r"Schema:\n(CREATE TABLE [A-Z_]+ \(.+\);\n){2,}\nQuestion: .+$": 0.1,
    },
    "code": {
        r"Complete the body of this Python function:\n\ndef \w+\(.*\).*:\n    \"\"\"": 0.2,
        r"Complete the body of this Python function \(a method of class `\w+`\):\n\ndef \w+\(self": 0.1,
        r"Write a (python )?function .+ Your code should pass these tests:\n\nassert .+\nassert .+": 0.3,
    },
    "math": {r"[A-Z0-9].*\d.*[.?]": 1.0},
    "medical": {
        r"Answer the research question from the abstract\.\n\n[A-Z].*: (.|\n)*\n\nQuestion: [A-Z].*\?$": 0.3,
        r"(What|How|Is|Who|Do|what) .{3,}$": 0.5,
    },
    "biochem": {
        r'In (anatomy and physiology|chemistry), what does the term ".+" mean\?$': 0.3,
        r'Write a short .+ textbook section on ".+" \(from the chapter part ".+"\)\.$': 0.15,
    },
    "summarization": {
        r"Summarize this paper abstract in one sentence\.\n\n[A-Z].+\.$": 0.35,
        r'Write the ".+" section of a clinical note from this conversation\.\n\nDoctor: .+\nPatient: .+': 0.45,
    },
    "chat": {r"[A-Z].{5,}": 0.99},
}
# range of characters that must hold the middle 90 % of our prompts
LENGTHS = {
    "sql": (150, 2000),
    "code": (100, 1000),
    "math": (60, 500),
    "medical": (18, 2000),
    "biochem": (25, 300),
    "summarization": (100, 1800),
    "chat": (8, 300),
}


def middle(texts: list[str]) -> tuple[int, int, int]:
    """Return the lengths at 5 %, 50 % and 95 %."""
    lengths = sorted(map(len, texts))
    return lengths[len(lengths) // 20], lengths[len(lengths) // 2], lengths[-len(lengths) // 20]


@pytest.fixture(scope="module", params=NAMES)
def generated(request) -> tuple[str, list[str]]:
    return request.param, list(get(request.param).generate(3000, seed=0))


def test_the_seven_domains_are_complete():
    assert tuple(DOMAINS) == NAMES
    for name, domain in DOMAINS.items():
        public = domain.public
        assert domain.name == name and domain.description
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", public.id) and public.licence and public.citation
        assert set(public.split) == {"train", "test"}
        assert all("{" + field + "}" in public.template for field in public.columns)


def test_three_thousand_prompts_are_distinct(generated):
    _, prompts = generated
    assert len(prompts) == len(set(prompts)) == 3000


def test_prompts_have_the_forms_of_their_domain(generated):
    name, prompts = generated
    for form, share in FORMS[name].items():
        matching = sum(re.match(form, prompt) is not None for prompt in prompts)
        assert matching >= share * len(prompts), f"{matching} prompts look like {form}"


def test_no_template_syntax_is_left(generated):
    name, prompts = generated
    for prompt in prompts:
        assert not re.search(r"\{\w*=|\{\w+\}|\$\{|##|//", prompt), prompt
        if name in ("math", "biochem", "summarization", "chat"):
            assert not re.search(r"[<>|{}]|(?<!\.)  |(?<! _) [,?](?!\w)", prompt), prompt


def test_lengths_are_in_range(generated):
    name, prompts = generated
    low, _, high = middle(prompts)
    assert LENGTHS[name][0] <= low <= high <= LENGTHS[name][1]


@pytest.mark.skipif(not REAL.is_dir(), reason="the real prompts are not on this machine")
def test_real_prompts_are_not_generated(generated):
    """Generated copies would spoil measurements on real prompts. In other domains short forms may coincide."""
    name, prompts = generated
    if name not in ("sql", "math", "code", "summarization"):
        pytest.skip("short fixed forms")
    real = {json.loads(line)["prompt"].strip() for path in REAL.glob(f"{name}.*.jsonl") for line in path.open()}
    assert not real & {prompt.strip() for prompt in prompts}


@pytest.mark.skipif(not REAL.is_dir(), reason="the real prompts are not on this machine")
@pytest.mark.parametrize("name", ["sql", "math"])
def test_lengths_match_the_real_prompts(name):
    real = [json.loads(line)["prompt"] for line in (REAL / f"{name}.train.jsonl").open()]
    ours = middle(list(get(name).generate(3000, seed=1)))
    assert all(0.6 < a / b < 1.6 for a, b in zip(ours, middle(real), strict=True)), (ours, middle(real))


def digest(hash_seed: str) -> str:
    program = (
        "from hashlib import sha256; from specctl.data_prep import DOMAINS; h = sha256()\n"
        "for d in DOMAINS.values():\n"
        "    for p in (*d.generate(200, seed=7), *d.generate(50, seed=7, split='test')): h.update(p.encode())\n"
        "print(h.hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


def test_the_same_seed_gives_the_same_prompts_in_every_process():
    """Catches sets, dicts and `hash()` in the generators, which depend on PYTHONHASHSEED."""
    here = sha256()
    for domain in DOMAINS.values():
        for prompt in (*domain.generate(200, seed=7), *domain.generate(50, seed=7, split="test")):
            here.update(prompt.encode())
    assert digest("1") == digest("2") == here.hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_seeds_differ_and_fewer_prompts_are_a_prefix(name):
    domain = get(name)
    twenty = list(domain.generate(20, seed=3))
    assert list(domain.generate(5, seed=3)) == twenty[:5]
    assert set(domain.generate(20, seed=4)) != set(twenty)


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint_for_any_seed(name):
    domain = get(name)
    test = set(domain.generate(300, seed=0, split="test")) | set(domain.generate(300, seed=1, split="test"))
    train = set(domain.generate(1500, seed=0)) | set(domain.generate(1500, seed=1))
    assert len(test) > 300 and not test & train


def test_asking_for_too_many_prompts_tells_how_many_exist():
    small = Domain("small", "one of fifty", DOMAINS["sql"].public, lambda random: f"prompt {random.randrange(50)}")
    with pytest.raises(
        PromptsExhausted, match=r"domain small has about \d\d distinct train prompts, but 1000 were requested"
    ):
        list(small.generate(1000, seed=0))
    assert issubclass(PromptsExhausted, ValueError)


def test_an_unknown_domain_suggests_the_nearest():
    with pytest.raises(UnknownDomain, match=r"'maths'; did you mean math") as caught:
        get("maths")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, UsageError)
    assert "summarization" in caught.value.hint and "--prompts FILE" in caught.value.hint
    with pytest.raises(UnknownDomain, match=r"'zzz'$"):
        get("zzz")


@pytest.mark.parametrize(("n", "split"), [(-1, "train"), (1, "dev")])
def test_bad_arguments_fail_at_the_call(n, split):
    with pytest.raises(ValueError, match=r"dev|-1"):
        get("sql").generate(n, 0, split)


@pytest.mark.parametrize(
    ("heading", "column"),
    [
        ("Original air date", "original_air_date"),
        ("No. in series", "no_in_series"),
        ("Pick #", "[pick_#]"),
        ("School/Club Team", "[school/club_team]"),
        ("2009", "[2009]"),
        ("1st leg", "[1st_leg]"),
    ],
)
def test_headings_become_schema_columns(heading, column):
    assert identifier(heading) == column


def test_sql_questions_mention_a_column_of_their_table():
    """Otherwise a head would learn to invent columns."""
    tables = [p for p in get("sql").generate(2000, seed=2) if "\nColumns: " in p]
    related = 0
    for prompt in tables:
        columns, question = re.search(r"Columns: (.+)\n\nQuestion: (.+)", prompt).groups()
        words = set(re.findall(r"\w{3,}", columns.lower()))
        related += any(word in question.lower() for word in words)
    assert related > 0.85 * len(tables)


def test_results_in_code_examples_are_right():
    """Checked for the two tasks with answers that can be computed here."""
    seen = 0
    for prompt in get("code").generate(6000, seed=0):
        for call, result in re.findall(r"assert (?:\w+_)?count_vowels\w*\((.+)\) ?== ?(\d+)$", prompt, re.M):
            assert sum(letter in "aeiouAEIOU" for letter in call[1:-1]) == int(result)
            seen += 1
        for a, b, result in re.findall(r"assert (?:\w+_)?rectangle_area\w*\((\d+), (\d+)\) ?== ?(\d+)$", prompt, re.M):
            assert int(a) * int(b) == int(result)
            seen += 1
    assert seen


@pytest.mark.parametrize("name", NAMES)
def test_samples_depend_only_on_the_random_stream(name):
    assert [get(name).sample(Random(5)) for _ in range(2)] == [get(name).sample(Random(5))] * 2
