"""The HTML page is complete and readable, and its data cannot add markup."""

import base64
from html.parser import HTMLParser
from pathlib import Path

from specctl import api

BAD = "<script>alert(1)</script>"


class Outside(HTMLParser):
    """Collect what a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.sources, self.tags = [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "style")]


def test_the_page_is_self_contained(eval_run, train_run, select_run):
    """All pictures are drawn here and embedded in the page."""
    result = api.report([eval_run(), train_run(), select_run()], eval_run("x") / "out")
    page = Path(result.report).read_text()
    parser = Outside()
    parser.feed(page)
    pictures = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in parser.sources]
    assert pictures == [Path(path).read_bytes() for path in result.pictures]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(pictures) == 12
    assert not parser.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert "url(" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_the_page_says_how_to_repeat_the_run(eval_run):
    page = Path(api.report([eval_run()]).report).read_text()
    for said in ("specctl eval --domain &#39;a b&#39;", "abc123", "Z80", "specctl 0.1", "command: eval", "1 min 1 s"):
        assert said in page


def test_names_from_data_are_escaped(eval_run, make_run):
    """Directories, domains and recipes may have any name."""
    argv = ["specctl", BAD]
    runs = [
        eval_run("a", drafter=BAD, recipe={"x": f'"{BAD}"'}, info={"argv": argv, "hardware": {BAD: BAD}, "git": BAD}),
        make_run("b", BAD, {BAD: BAD, "rows": [{BAD: BAD}]}),
        make_run("c", "../../../up", {"x": 1}),
    ]
    result = api.report(runs, runs[0].parent / "out", csv=True)
    page = Path(result.report).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    outside = [path for path in (*result.pictures, *result.tables) if Path(path).parent != runs[0].parent / "out"]
    assert outside == [], "a command's name must not lead out of the directory"
