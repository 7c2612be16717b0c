"""Tokens of training texts take four bytes each, stored once for all processes of a machine."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from specctl.training.example import Example
from specctl.training.tokens import TokenArray


def test_a_stored_text_reads_like_a_list():
    home = TokenArray()
    lists = [[5, 6, 7, 8], [], [9]]
    texts = [home.add(tokens) for tokens in lists]
    for text, tokens in zip(texts, lists, strict=True):
        assert len(text) == len(tokens) and list(text) == tokens and text == tokens
        assert text[1:] == tokens[1:] and text[:-1] == tokens[:-1] and text[-2:10] == tokens[-2:10]
        assert isinstance(text[1:], list)
    assert texts[0][-1] == 8 and texts[0][0] == 5 and texts[0] != texts[2]
    for place in (4, -5):
        with pytest.raises(IndexError):
            texts[0][place]


def test_an_example_takes_five_bytes_per_token():
    """Including overhead; a list takes 8 bytes for the pointer and 28 for an integer above 256."""

    def bytes_a_token(keep):
        tracemalloc.start()
        kept = [keep(i, list(range(1000, 1600))) for i in range(300)]
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size / (600 * len(kept))

    home = TokenArray()
    assert bytes_a_token(lambda i, tokens: Example(i, f"sql-{i:016}", home.add(tokens), 100)) < 5
    assert bytes_a_token(lambda i, tokens: Example(i, f"sql-{i:016}", tokens, 100)) > 30


@pytest.mark.parametrize(
    "case",
    ["same", *(pytest.param(case, marks=pytest.mark.slow) for case in ("other tokens", "two machines", "no room"))],
)
def test_processes_share_one_copy(case, tmp_path):
    """Two processes share tokens if they can, read the same tokens anyway, and leave no files."""
    script = Path(__file__).parent / "sharing_ranks.py"
    ranks = [
        subprocess.Popen([sys.executable, script, str(tmp_path), str(rank), case], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    mapped = {"same": [True, True], "other tokens": [True, False]}.get(case, [False, False])
    assert [one["mapped"] for one in told] == mapped
    assert all(one["read"] == one["before"] for one in told)
    assert not list((tmp_path / "tmp").iterdir())
