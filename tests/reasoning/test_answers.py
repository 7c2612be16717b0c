"""Answers: extracted where they are marked, compared by value, and programs run only with permission."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from specctl.errors import UsageError
from specctl.lab.reasoning import answers
from specctl.lab.reasoning.answers import correct, equal_answers, extract, normalise, passes_tests


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 eggs\n#### 12", "12"),
        ("#### 3\nno, better\n#### 1,200\n", "1,200"),
        (r"so \boxed{7}, that is \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{8} #### 9", "8"),
        (r"\boxed{never closed", None),
        ("Therefore the answer is (B).", "(B)"),
        ("The answer is 42.", "42"),
        ("**Answer:** 42", "42"),
        ("The answer is: **option (b)**", "B"),
        ("The answer is a number between 3 and 5", None),
        ("He has 12 apples and 3 pears", None),
        ("####", None),
        ("#### \n", None),
        ("", None),
    ],
)
def test_the_last_marked_answer_is_extracted(text, answer):
    found = extract(text)
    assert found == answer or normalise(found) == normalise(answer)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,200", "1200.00"),
        ("$18", "18"),
        ("18 dollars", "18"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac{3}{4}", "0.75"),
        ("50%", "50"),
        (r"12\text{ cm}", "12"),
        ("(C)", "C"),
        ("C.", "(C)"),
        ("-3", "-3.0"),
        ("x + 1", "X  +  1"),
        (r"1\frac{1}{2}", "1.5"),
        ("-1 1/2", "-1.5"),
        (r"\frac34", "0.75"),
        ("(b)", "B"),
        (r"\text{(C)}", "C"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{7}", "7"),
        (r"90^\circ", "90"),
    ],
)
def test_equal_values_in_other_notations_are_equal_answers(one, other):
    assert equal_answers(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("12", "13"), ("A", "B"), ("3", "-3"), ("1/0", "0"), (None, None), ("5", None)),
        *((r"\text{Evelyn}", r"\text{Bob}"), (r"3\pi", "3"), ("x^2", "2"), ("1 1/0", "1"), (r"1\frac{1}{2}", "11/2")),
    ],
)
def test_different_or_missing_values_are_different_answers(one, other):
    assert not equal_answers(one, other)


@pytest.mark.parametrize(
    "answer",
    [
        *("1e99999999", "-1E+99999999", "1e-99999999", "1e9_999_999_9", "1e99999999/3", r"\frac{1e99999999}{3}"),
        *("9" * 4301, "0." + "9" * 4301, "9" * 5000 + " dollars", "1/" + "9" * 5000, "1" + ",111" * 2000),
        "\\text{" * 20_000,
    ],
    ids=lambda text: text[:20],
)
def test_huge_numbers_are_compared_as_text(answer):
    """A model in a loop writes such numbers. Python would compute for hours, or raise ValueError."""
    assert isinstance(normalise(answer), str)
    assert correct(rf"\boxed{{{answer}}}", "5") is False
    assert equal_answers(answer, answer)


def test_without_a_reference_answer_correctness_is_unknown():
    assert correct("#### 3", None) is None
    assert correct("#### 3", "A long explanation that says why, and never says what. " * 3) is None
    assert correct("#### 3", "so\n#### 3") is True
    assert correct("no answer at all", "3") is False


def test_running_a_models_program_needs_permission():
    tests = "assert double(2) == 4"
    assert correct("def double(x): return 2 * x", tests) is None
    with pytest.raises(UsageError, match="running programs"):
        passes_tests("def double(x): return 2 * x", tests, allowed=False)


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("Here it is:\n```python\ndef double(x):\n    return 2 * x\n```", True),
        ("def double(x): return x", False),
        ("raise SystemExit(0)\ndef double(x): return x", False),
        ("import os; os._exit(0)", False),
        ("\0", False),
        ("open('big', 'wb').write(b'x' * (2 << 20))\ndef double(x): return 2 * x", False),
        ("import os\nassert not os.environ.get('HOME')\ndef double(x): return 2 * x", True),
    ],
)
def test_a_program_is_judged_by_its_tests(program, passed):
    """A program that exits before its tests also has exit code 0."""
    assert passes_tests(program, "assert double(2) == 4", allowed=True) is passed


def test_child_processes_of_a_program_are_killed(tmp_path, monkeypatch):
    """Once only the program itself was killed, and its children continued."""
    monkeypatch.setattr(answers, "LIMITS", "")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"import os, time\nheld = open({str(fifo)!r}, 'w')\nif os.fork() == 0:\n    time.sleep(60)\n"
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(fifo.read_bytes)  # ends when no process has the other end open
        assert passes_tests(program, "", allowed=True)
        assert reading.result(60) == b""
