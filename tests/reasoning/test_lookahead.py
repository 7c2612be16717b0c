"""Lookahead reasoning: the accepted steps, the target's own steps, and that the text always ends."""

import copy
from types import MappingProxyType, SimpleNamespace

import pytest

from specctl.adaptation.draft_length import TRIAL_EVERY
from specctl.adaptation.stream import EncodedPrompt
from specctl.decoding.target import Target
from specctl.distillation.prompts import Prompt
from specctl.drafters.text.lookup import Lookup
from specctl.errors import DataError, Interrupted
from specctl.lab.reasoning import lookahead
from specctl.lab.reasoning.judge import Judge
from specctl.lab.reasoning.lookahead import TRIED, Lookahead
from specctl.lab.reasoning.options import LookaheadRecipe
from specctl.lab.reasoning.writer import Proposal, Step, StepDrafter, Writer, WritingWork
from specctl.progress import interrupts
from tests.conftest import write_tiny

RECIPE = LookaheadRecipe(temperature=0.0, budget=40, answer_tokens=4, step_tokens=10).resolved("builtin")


class Letters:
    """A text of letters, one token each. Every step is one letter and a line break."""

    name, context_length, eos_ids, row_flops = "letters", 1000, frozenset({0}), 10
    identity = MappingProxyType({"vocab_hash": "letters"})

    def __init__(self):
        self.tokenizer = SimpleNamespace(encode=lambda text, **options: [ord(char) for char in text])

    @staticmethod
    def text(ids):
        return "".join(chr(token) for token in ids if token)


def step(text):
    """`a.` is a complete step, `a` a step cut at its limit, `a!` a step that ends the text."""
    body, mark = (text[:-1], text[-1]) if text[-1] in ".!" else (text, "")
    ids = [ord(char) for char in body] + {".": [10], "!": [0], "": []}[mark]
    return Step(ids, Letters.text(ids), {".": "delimiter", "!": "final", "": "limit"}[mark])


class Script:
    """Writes scripted steps: `says(previous text) -> step`."""

    def __init__(self, says):
        self.says, self.model, self.work = says, Letters(), WritingWork()
        self.stepper = SimpleNamespace(text=Letters.text)
        self.batches = []

    def steps(self, texts, limits, seed):
        self.batches.append(len(texts))
        found = [step(self.says(Letters.text(text).removeprefix("?"))) for text in texts]
        return [Step(one.ids[:limit], Letters.text(one.ids[:limit]), one.end if len(one.ids) <= limit else "limit")
                for one, limit in zip(found, limits, strict=True)]  # fmt: skip

    def rest(self, text, limit, seed):
        return [ord("9"), 0][:limit]


def lines(*steps):
    """These steps in order, selected by the number of previous lines."""
    return lambda text: steps[min(text.count("\n"), len(steps) - 1)]


ARRIVAL = EncodedPrompt(Prompt("p", [{"role": "user", "content": "?"}], "math", "f:1", "#### 9"), [ord("?")])


def answer(target, draft=None, aligned=(), arrival=ARRIVAL, **changes):
    """(trace, script of the target): `aligned` are the unequal pairs that the judge accepts."""
    writer = Script(target)
    judge = Judge(lambda pairs: [pair in aligned for pair in pairs])
    drafts = None if draft is None else StepDrafter(Script(draft), writer.model)
    recipe = RECIPE.model_copy(update={"transition": "\n####"} | changes)
    return Lookahead(writer, recipe, drafts, judge).answer(arrival), writer


def test_the_longest_aligned_run_is_kept_followed_by_the_targets_step():
    trace, target = answer(lines("a.", "b.", "c.", "d!"), lines("a.", "B.", "x.", "d."))
    assert trace.text == "a\nB\nc\nd"
    assert (trace.rounds, trace.accepted, trace.own_steps, trace.rejected) == (2, 2, 2, 2)
    assert target.batches == [5, 5], "the context, and one prefix per drafted step"
    assert trace.accepted_tokens == 4


def test_if_all_steps_are_aligned_the_targets_next_step_is_free():
    trace, target = answer(lines("a.", "b.", "c.", "d.", "e!"), lines("a.", "b.", "c.", "d.", "e!"))
    assert (trace.text, trace.rounds, target.batches) == ("a\nb\nc\nd\ne", 1, [5])
    assert (trace.accepted, trace.own_steps, trace.rejected) == (4, 1, 0)


def test_an_aligned_step_keeps_the_wording_of_the_draft():
    trace, _ = answer(lines("a.", "b!"), lines("x.", "b!"), aligned=[("x\n", "a\n")])
    assert trace.text == "x\nb"
    assert not trace.mismatches


def test_a_final_step_is_not_equal_to_one_that_continues():
    """With equal words, the draft's step would continue the text after the target had finished it."""
    trace, _ = answer(lines("a.", "b!"), lines("a.", "b."))
    assert (trace.text, trace.stop) == ("a\nb", "final")
    (mismatch,) = trace.mismatches
    assert (mismatch.chosen, mismatch.rejected) == (step("b!").ids, step("b.").ids)


def test_no_step_follows_a_final_drafted_step():
    trace, target = answer(lines("a.", "b!"), lines("a.", "b!"))
    assert target.batches == [2], "no prefix after the end of the text"
    assert (trace.accepted, trace.own_steps) == (2, 0)


def test_sequential_verification_stops_at_the_first_mismatch_with_the_same_text():
    scripts = lines("a.", "b.", "c.", "d!"), lines("a.", "B.", "x.", "d.")
    one, target = answer(*scripts, parallel=False)
    other, _ = answer(*scripts)
    assert target.batches == [1] * 4
    assert (one.text, one.accepted, one.rejected) == (other.text, other.accepted, other.rejected)
    assert one.target_steps == 4 < other.target_steps


def test_a_mismatch_records_its_context_and_both_steps():
    trace, _ = answer(lines("a.", "b.", "c!"), lines("a.", "x.", "c!"))
    (mismatch,) = trace.mismatches
    assert Letters.text(mismatch.context) == "?a\n"
    assert (mismatch.chosen, mismatch.rejected) == (step("b.").ids, step("x.").ids)
    assert (mismatch.chosen_text, mismatch.rejected_text) == ("b\n", "x\n")


def test_without_a_draft_the_target_writes_one_step_per_round():
    trace, target = answer(lines("a.", "b.", "c!"))
    assert (trace.text, target.batches, trace.accepted) == ("a\nb\nc", [1, 1, 1], 0)


def test_at_the_budget_thinking_ends_with_the_transition():
    counting = (chr(97 + n) + "." for n in range(100))
    trace, _ = answer(lambda text: next(counting), budget=7)
    assert trace.stop == "budget"
    assert trace.text.endswith("####9")
    thought = trace.text.split("####")[0]
    assert len(thought) in (7, 8), "seven tokens of thinking, and the line break that the transition begins with"
    assert (trace.answer, trace.right) == ("9", True)


def test_drafts_stay_within_the_budget():
    letters = [chr(97 + n) + "." for n in range(26)]
    trace, _ = answer(lines(*letters), lines(*letters), budget=7)
    assert trace.text.split("####")[0].strip("\n") == "a\nb\nc\nd"


@pytest.mark.parametrize("draft", [None, lines("a.")])
def test_repeated_steps_end_thinking(draft):
    trace, _ = answer(lines("a."), draft, max_repeats=3)
    assert (trace.stop, trace.text) == ("loop", "a\na\na\n####9")


def test_repeated_empty_steps_end_thinking():
    trace, _ = answer(lines("."), lines("."))
    assert trace.stop == "loop"


def test_steps_without_a_delimiter_are_cut_at_their_limit():
    trace, _ = answer(lambda text: "z" * 10, budget=30, max_repeats=9)
    assert (trace.stop, trace.text.count("z")) == ("budget", 30)


def test_after_thinking_ended_the_answer_has_its_own_budget():
    """Otherwise the transition would interrupt the answer."""
    long = ["a.", "</think>.", *(f"{letter}." for letter in "bcdefgh"), "i!"]
    trace, _ = answer(lines(*long), budget=12, answer_tokens=30)
    assert (trace.stop, trace.text.endswith("h\ni")) == ("final", True)


def test_after_thinking_ended_no_transition_is_added():
    long = ["a.", "</think>.", *(f"{letter}." for letter in "bcdefghijklmnopqrstuvw")]
    trace, _ = answer(lines(*long), budget=12, answer_tokens=10)
    assert (trace.stop, "####" in trace.text) == ("budget", False)


@pytest.mark.parametrize(("room", "text"), [(2, ""), (9, "####9")])
def test_a_prompt_near_the_context_length_gets_a_short_answer_or_none(room, text):
    """One long prompt must not end a run."""
    crowded = EncodedPrompt(ARRIVAL.prompt, [ord("?")] * (1000 - room))
    trace, _ = answer(lines("a!"), arrival=crowded)
    assert trace.stop == "budget" and trace.text.endswith(text)
    assert len(trace.ids) <= max(room, len("\n####"))


def test_steps_after_a_detected_loop_are_not_counted():
    """They are accepted in the same round, but are not part of the text."""
    trace, _ = answer(lines("a."), lines("a."), max_repeats=3)
    assert (trace.accepted, trace.own_steps) == (3, 0)


def test_a_signal_interrupts_between_steps():
    import signal

    def says(text):
        interrupts.handle(signal.SIGTERM)
        return "a."

    try:
        with pytest.raises(Interrupted):
            answer(says)
    finally:
        interrupts.reset()


# Tests with models.


def arrival_of(target, text, id="q"):
    messages = [{"role": "user", "content": text}]
    return EncodedPrompt(Prompt(id, messages, "math", "f:1"), target.render(messages))


@pytest.fixture(scope="module")
def question(target):
    return arrival_of(target, "Ann has 3 apples and buys 4 more. How many apples does she have?")


SMALL = RECIPE.model_copy(update={"budget": 30, "step_tokens": 12, "depth": 2, "temperature": 0.7})


@pytest.fixture(scope="module")
def alone(target, question):
    return Lookahead(Writer(target, SMALL), SMALL).answer(question)


def test_steps_of_a_draft_equal_to_the_target_are_always_accepted(target, question, alone):
    """A token drawn at a position depends on the seed only, not on the model or the batch."""
    judge = Judge(lambda pairs: pytest.fail(f"equal models wrote {pairs}"))
    trace = Lookahead(Writer(target, SMALL), SMALL, StepDrafter(Writer(target, SMALL), target), judge).answer(question)
    assert trace.ids == alone.ids
    assert trace.rejected == 0 and trace.accepted > trace.own_steps
    assert trace.rounds < alone.rounds
    assert trace.target.passes < alone.target.passes


def test_an_exact_judge_gives_the_targets_text(target, tiny_directory, question, alone):
    """A random draft LM is never right. The remaining steps are the target's, in any batch."""
    from specctl.decoding.target import load_target

    poor = StepDrafter(Writer(load_target(tiny_directory("llama"), device="cpu", dtype="fp32"), SMALL), target)
    judge = Judge(lambda pairs: [False] * len(pairs))
    trace = Lookahead(Writer(target, SMALL, Lookup()), SMALL, poor, judge).answer(question)
    assert trace.ids == alone.ids
    assert trace.accepted == 0 and trace.rejected == len(trace.mismatches) == trace.rounds
    assert trace.flops > alone.flops


def test_automatic_depth_stops_drafting_with_a_useless_draft_lm(monkeypatch):
    """After some trial rounds the target writes alone, and the text is the same."""
    written = []  # every step takes one second
    plain = Script.steps
    monkeypatch.setattr(Script, "steps", lambda self, *of: written.append(1) or plain(self, *of))
    monkeypatch.setattr(lookahead, "time", SimpleNamespace(perf_counter=lambda: float(len(written))))
    told = {"budget": 400, "max_repeats": 99}
    alone, _ = answer(lambda text: "abcdef"[text.count("\n") % 6] + ".", **told)
    trace, _ = answer(lambda text: "abcdef"[text.count("\n") % 6] + ".", lambda text: "x.", depth="auto", **told)
    assert trace.ids == alone.ids and trace.rounds == 200
    assert trace.drafted == trace.rejected == TRIED // 2 + 200 // TRIAL_EVERY and trace.accepted == 0


@pytest.fixture(scope="module")
def stranger(tmp_path_factory, target):
    """A draft LM with another tokenizer."""
    import transformers

    directory = tmp_path_factory.mktemp("stranger")
    write_tiny(directory, "LlamaConfig", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                          "num_attention_heads": 2, "num_key_value_heads": 2})  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["How many apples", "Then she has"])
    model.resize_token_embeddings(len(tokenizer))
    return Target("stranger", model.eval(), tokenizer)


def test_steps_are_converted_for_another_tokenizer(target, stranger, question):
    draft = StepDrafter(Writer(stranger, SMALL), target)
    thought = target.tokenizer.encode("Then she has 3\n", add_special_tokens=False)
    text = draft.text(question, thought)
    assert not draft.shared
    assert stranger.tokenizer.decode(text).endswith("Then she has 3\n")
    assert len(text) < len(question.ids + thought), "its vocabulary has whole phrases"
    for step, own in draft.propose(question, thought, 2, 40, seed=0):
        assert target.tokenizer.decode(step.ids, skip_special_tokens=True) == own.text
    final = Step([*thought, min(target.eos_ids)], "Then she has 3\n", "final")
    assert draft.to_draft_tokens(final)[-1] in stranger.eos_ids


def test_a_final_step_gets_the_draft_lms_own_end_of_turn(target, stranger):
    """Qwen3 has two end tokens. If it learned from the other one, the draft LM would not know where a turn ends."""
    chat = copy.copy(stranger)
    turn = chat.tokenizer.eos_token_id
    chat.eos_ids = frozenset({turn, 0})
    draft = StepDrafter(Writer(chat, SMALL), target)
    assert draft.to_draft_tokens(Step([50, turn], "a", "final"))[-1] == turn != min(chat.eos_ids)


def test_another_tokenizer_without_a_chat_template_is_refused(target, stranger):
    mute = copy.copy(stranger)
    mute.tokenizer = copy.deepcopy(stranger.tokenizer)
    mute.tokenizer.chat_template = None
    with pytest.raises(DataError, match="another tokenizer"):
        StepDrafter(Writer(mute, SMALL), target)


def test_a_draft_lm_with_a_full_context_proposes_nothing(target, tiny_directory, question):
    from specctl.decoding.target import load_target

    small = StepDrafter(Writer(load_target(tiny_directory("llama"), device="cpu", dtype="fp32"), SMALL), target)
    assert small.propose(question, [50] * 300, 2, 40, seed=0) == []
    assert isinstance(small.propose(question, [], 1, 40, seed=0)[0], Proposal)
