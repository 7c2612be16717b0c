"""Recipe keys, options, result documents and the files of runs have not changed, key by key: users keep them.

The reference files are in this directory: `recipes.json` (every key's type, default and limits), `options.json`,
`shipped.json`, `environment.json`, `results.json` (the output of `--json`) and `files.json` (the files of runs).
The small runs take about a minute of one core. After an intended change, `python -m tests.golden.regenerate` (from the
root of the checkout) rewrites the reference, and the difference is part of the commit.
"""

import operator

import pytest

from tests.golden import regenerate
from tests.golden.shapes import differences, same_kinds, shape_of

WORDED = ("recipes", "options", "shipped", "environment")
NAMES = (*WORDED, "results", "files")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return regenerate.everything(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_users_keep_has_changed(found, name):
    changed = changes(name, regenerate.reference(name), found[name])
    assert not changed, "\n".join(changed)


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_key_is_seen(name):
    """Every key of every document."""
    for title, shape in regenerate.reference(name).items():
        for key, kind in shape.items():
            renamed = {other: shape[other] for other in shape if other != key} | {"renamed": kind}
            expected = [f"{title}: {key} is gone (was {kind})", f"{title}: renamed is new ({kind})"]
            assert differences(title, shape, renamed) == expected


def test_a_changed_value_is_seen():
    document = {"rows": [{"mat": 1.5, "best": None, "pulls": {"sql-eagle3": 3}}, {"mat": 2.0}], "git": None}
    shape = shape_of(document)
    assert shape["rows[].mat"] == "float" and shape["rows[].pulls.<name>"] == "int" and shape["git"] == "any"
    assert differences("a", shape, shape_of(document | {"git": "4f1"})) == []
    other = shape_of({"rows": [{"mat": "1.5", "best": "sql", "pulls": {"math-eagle3": 4}}], "git": None})
    assert differences("a", shape, other) == ["a: rows[].mat was float, is str"]
    assert differences("a", shape, shape_of(document | {"rows": None})) == ["a: rows was list, is null"]


def test_a_changed_default_is_seen():
    reference = regenerate.reference("recipes")
    key = "data.limit"
    other = reference | {"distill": reference["distill"] | {key: reference["distill"][key].replace("null", "7")}}
    assert [line.split(" was ")[0] for line in changes("recipes", reference, other)] == [f"distill: {key}"]


def changes(name, reference, found):
    """A line for every difference of two sets of documents, new and missing documents included."""
    fits = operator.eq if name in WORDED else same_kinds
    titles = differences(name, dict.fromkeys(reference, "document"), dict.fromkeys(found, "document"))
    both = [title for title in reference if title in found]
    return titles + [line for title in both for line in differences(title, reference[title], found[title], fits)]
