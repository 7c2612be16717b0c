"""Plain decoding as an arm: it is played if every drafter loses, and hardly ever if a drafter wins."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specctl.decoding.records import DraftTree, Label
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.drafters.text.lookup import Lookup
from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.replay import replay
from specctl.lab.recorded.trace import Table, with_plain
from specctl.recipe import GameRecipe, PolicyRecipe
from specctl.selection.arms import PLAIN, Arm, plain_arm
from specctl.selection.assembly import Decoding, make_selector
from specctl.selection.policies import registry
from tests.selection.tables import trace_of
from tests.selection.test_rewards import ticking  # noqa: F401 - a fixture is asked for by name
from tests.toys.decoding import decode

STEP, DEPTH, DRAFTERS, TOKENS = 1.0, 6, 4, 100  # seconds, longest draft, drafters, tokens per text
KINDS = np.random.default_rng(5).normal(size=(2, 16))


def stream(gamma, cost, texts=40, seed=0):
    """A table of `texts`: drafters accept a token with probability `gamma(text)` [drafters] and take `cost` seconds per
    round; the prompts of even and odd texts are of two kinds."""
    draw = np.random.default_rng(seed)
    traces = []
    for text in range(texts):
        own = np.clip(gamma(text) + 0.05 * draw.normal(size=DRAFTERS) + 0.05 * draw.normal(), 0.02, 0.98)
        each = np.broadcast_to(own[:, None, None], (DRAFTERS, TOKENS, DEPTH)).copy()
        trace = trace_of(each, int(draw.integers(2**31)), f"q{text}")
        traces.append(replace(trace, context=3 + KINDS[text % 2] + 0.3 * draw.normal(size=16)))
    names = [f"head {number}" for number in range(DRAFTERS)]
    draft_s, step_s = np.full(DRAFTERS, cost - 1.1 * STEP), STEP * np.array([1.0] + [1.1] * DRAFTERS)
    return Table(names, DEPTH, traces, draft_s, step_s, np.full(DRAFTERS, DEPTH))


def played(table, algo="cgp-ucb", **game):
    """(tokens per plain step's time, share of plain rounds) of a policy that starts anew with every text."""
    done = replay(algo, Hindsight(table), PolicyRecipe(), GameRecipe(**game))
    arms = np.concatenate([part.arms for part in done.played])
    plain = np.mean([table.arms[arm] == PLAIN for arm in arms])
    return TOKENS * len(table.traces) * STEP / done.seconds.sum(), plain


def losing(text):
    return np.array([0.30, 0.25, 0.2, 0.1])


def winning(text):
    return np.array([0.75, 0.7, 0.6, 0.5])


@pytest.mark.parametrize("seed", range(2))
def test_plain_decoding_is_played_if_every_drafter_loses(seed):
    """The best drafter makes 1.4 tokens in 1.6 steps."""
    table = stream(losing, 1.6, seed=seed)
    without, _ = played(table)
    speed, plain = played(with_plain(table))
    assert without < 0.95 and speed > 0.98 and plain > 0.9


def test_plain_decoding_is_hardly_tried_if_a_drafter_wins():
    """The mean of two streams: the choice among nearly equal drafters alone changes the speed by 1 or 2 %."""
    without, speeds, shares = [], [], []
    for seed in (0, 2):
        table = stream(winning, 1.6, seed=seed)
        without.append(played(table)[0])
        speed, plain = played(with_plain(table))
        speeds.append(speed)
        shares.append(plain)
    assert min(without) > 1.5 and np.mean(speeds) > 0.98 * np.mean(without) and max(shares) < 0.006


def test_plain_decoding_is_chosen_per_kind_of_prompt():
    """Drafts pay for every other text; the prompt and the first rounds tell which."""
    table = stream(lambda text: winning(text) if text % 2 else losing(text), 1.6, texts=80)
    half = [stream(each, 1.6, texts=40) for each in (winning, losing)]
    without, _ = played(table)
    speed, plain = played(with_plain(table))
    best = 2 / (1 / played(half[0])[0] + 1)  # drafts for the winning kind, plain decoding for the losing one
    assert speed > max(1.05 * without, 0.95 * best) and 0.4 < plain < 0.7


def test_drafting_is_tried_again_after_long_plain_decoding():
    """Drafts start to pay after text 20, as with a datastore that grows; the prompts do not tell."""
    table = with_plain(stream(lambda text: losing(text) if text < 20 else winning(text), 1.6, texts=60))
    done = replay("cgp-ucb", Hindsight(table), PolicyRecipe(), GameRecipe())
    plain = [np.mean([table.arms[arm] == PLAIN for arm in part.arms]) for part in done.played]
    assert np.median(plain[10:20]) > 0.9 and np.mean(plain[30:]) < 0.1


def test_throughput_policies_also_use_the_plain_arm():
    lost, won = (stream(each, 1.6, texts=12) for each in (losing, winning))
    options = {"hedgespec": {"loss": "throughput"}, "metasd-ucb": {"reward": "throughput"}}
    for algo, game in options.items():
        speed, plain = played(with_plain(lost), algo, **game)
        assert speed > played(lost, algo, **game)[0], algo
        assert plain > 4 * played(with_plain(won), algo, **game)[1], algo


NEW, SAMPLED = 40, Sampling(1.0, 0, 1.0)


@pytest.fixture(scope="module")
def tiny(tiny_directory):
    return load_target(tiny_directory("qwen3"), device="cpu", dtype="fp32")


class Told(Lookup):
    """Drafts the next `right` tokens of known answers in `seconds` of a fake clock."""

    def __init__(self, answers, right, seconds, now):
        super().__init__(4)
        self.answers, self.right, self.cost, self.now = answers, right, seconds, now

    def propose(self, state, budget):
        self.now[0] += self.cost
        chains = []
        for row in state.rows:
            rest = self.answers[tuple(row.ids[: row.prompt_length])][len(row.ids) - row.prompt_length :]
            chains.append(rest[: min(self.right, budget, row.draft_room)])
        return DraftTree.from_chains(chains, state.device)


def selected(target, drafters, prompts, algo, sampling=GREEDY, batch=1):
    """(answers to the prompts, rounds of each arm) with plain decoding among the drafters."""
    arms, log = [plain_arm(), *(Arm(name, drafter) for name, drafter in drafters.items())], []
    controller = make_selector(
        target,
        arms,
        algo,
        GameRecipe(),
        lambda own, text: registry.build(algo, own, PolicyRecipe()),
        Decoding(step=lambda: STEP, seed=0, within_query=True, on_round=log.append),
    )
    answers = []
    for start in range(0, len(prompts), batch):
        turn = prompts[start : start + batch]
        options = dict(sampling=sampling, max_new_tokens=NEW, seeds=[7] * len(turn), taps=controller.taps)
        labels = [Label(f"q{start + place}") for place in range(len(turn))]
        answers += decode(target, turn, controller=controller, labels=labels, **options)
    return answers, Counter(line.arm for line in log)


@pytest.fixture(scope="module")
def asked(tiny):
    """24 prompts with their answers, greedy and sampled."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, tiny.vocab_size, 12).tolist() for _ in range(24)]
    options = dict(max_new_tokens=NEW, seeds=[7] * len(prompts))
    return prompts, {each: decode(tiny, prompts, sampling=each, **options) for each in (GREEDY, SAMPLED)}


@pytest.mark.parametrize(
    ("algo", "sampling", "batch"),
    [("cgp-ucb", GREEDY, 1), ("cgp-ucb", SAMPLED, 3), ("hedgespec", GREEDY, 3), ("hedgespec", SAMPLED, 1)],
)
def test_texts_with_a_plain_arm_equal_plain_decoding(tiny, asked, ticking, algo, sampling, batch):  # noqa: F811
    prompts, plain = asked[0][:6], asked[1][sampling][:6]
    known = {tuple(prompt): answer.output_ids for prompt, answer in zip(prompts, plain, strict=True)}
    drafters = {"told": Told(known, 2, 0.5, ticking), "lookup": Lookup(4)}
    answers, rounds = selected(tiny, drafters, prompts, algo, sampling, batch)
    assert [one.output_ids for one in answers] == [one.output_ids for one in plain]
    assert rounds[PLAIN] and rounds["told"]


@pytest.mark.parametrize(("seconds", "loses"), [(1.5, True), (0.2, False)])
def test_live_decoding_plays_the_plain_arm_if_it_is_fastest(tiny, asked, ticking, seconds, loses):  # noqa: F811
    """Each draft advances a fake clock by `seconds`, each target step by 1 s. Rounds with drafts commit two tokens,
    which loses a fifth of the speed or gains two thirds."""
    prompts, answers = asked[0], asked[1][GREEDY]
    known = {tuple(prompt): answer.output_ids for prompt, answer in zip(prompts, answers, strict=True)}
    drafters = {f"told {n}": Told(known, 1, seconds + 0.05 * n, ticking) for n in range(3)}
    _, rounds = selected(tiny, drafters, prompts, "cgp-ucb")
    tokens = sum(answer.decoded_tokens for answer in answers)
    assert tokens > 500, "enough decoded tokens to compare"
    if loses:
        assert ticking[0] < tokens * STEP / 0.98 and rounds[PLAIN] > 0.9 * rounds.total()
    else:
        assert ticking[0] < 0.65 * tokens * STEP and rounds[PLAIN] < 0.02 * rounds.total()
