"""`choice=batch`: one arm for all sequences of a batch, with one game per batch size."""

import pytest

from specctl.decoding import host_runner
from specctl.decoding.records import Label
from specctl.decoding.sampling import GREEDY
from specctl.drafters.text.lookup import Lookup
from specctl.errors import UsageError
from specctl.recipe import GameRecipe, PolicyRecipe
from specctl.selection.arms import Arm
from specctl.selection.assembly import Decoding, make_batch_selector
from specctl.selection.batched import load_bucket
from specctl.selection.game.rules import check_batch
from specctl.selection.policies import registry
from tests.toys.decoding import decode

NEW = 24


def test_batch_sizes_are_grouped_by_powers_of_two():
    assert [load_bucket(texts) for texts in (1, 2, 3, 4, 5, 8, 9, 50)] == [1, 2, 4, 4, 8, 8, 16, 64]


def built(arms, algo, log, reward="throughput", **options):
    policy = PolicyRecipe(**options)
    return make_batch_selector(
        arms,
        algo,
        GameRecipe(reward=reward),
        lambda own, label: registry.build(algo, own, policy),
        Decoding(step=lambda: 0.01, seed=0, on_round=log.append),
    )


def played(target, controller, prompts, seed=0):
    return decode(
        target,
        prompts,
        sampling=GREEDY,
        max_new_tokens=[NEW - 3 * n for n in range(len(prompts))],
        seeds=[0] * len(prompts),
        controller=controller,
        taps=controller.taps,
        labels=[Label(f"q{n}", "sql", seed=seed) for n in range(len(prompts))],
    )


def test_every_batch_size_has_a_game_and_every_round_one_arm(target, prompts):
    """Each arm drafts its own number of nodes at every batch size, and the text equals plain decoding's."""
    log = []
    arms = [Arm(f"×{nodes}", Lookup(8), nodes, weighs_rows=True) for nodes in (1, 6)]
    controller = built(arms, "random", log)
    texts = (prompts * 3)[:5]
    found = played(target, controller, texts)
    plain = decode(target, texts, sampling=GREEDY, max_new_tokens=[NEW - 3 * n for n in range(5)], seeds=[0] * 5)
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]
    loads = {load_bucket(int(line.query.split()[0])) for line in log}
    assert loads == set(controller.games) >= {1, 8} and sum(controller.tally.pulls.values()) == len(log)
    assert sum(line.committed for line in log) == sum(one.decoded_tokens for one in found)
    assert max(line.drafted for line in log if line.arm == "×1") == 1
    assert max(line.drafted for line in log if line.query == "5 texts") > 3, "five texts may exceed 24 rows"
    assert controller.failures == 0 and controller.tally.switches > 0


def test_rewards_of_a_batch_are_per_sequence(target, prompts, monkeypatch):
    """The reward is the batch's tokens per second relative to a plain step of the batch: the reward of one sequence."""
    clock = iter(range(10**6))
    monkeypatch.setattr(host_runner, "work_clock", lambda device: lambda: next(clock) / 100)  # a round takes 10 ms
    log = []
    controller = built([Arm("plain", Lookup(0), 0)], "ucbspec", log)
    played(target, controller, prompts[:2])
    K = controller.games[2].rules.depth
    both = [line for line in log if line.query == "2 texts"]
    assert both and all(line.committed == 2 for line in both)
    assert [line.learnt for line in both] == pytest.approx([1 + K * min(2 / (K + 1), 1.0)] * len(both))


def test_the_fastest_arm_is_learned_per_batch_size(target, prompts, monkeypatch):
    """`long` is slow for a batch and fast for one sequence; `short` is the reverse."""
    now = [0.0]
    monkeypatch.setattr(host_runner, "work_clock", lambda device: lambda: now[0])

    class Priced(Arm):
        def __init__(self, name, drafter, nodes, prices):
            super().__init__(name, drafter, nodes, weighs_rows=True)
            self.prices = prices

        def propose(self, state, budget):
            now[0] += self.prices[load_bucket(len(state.live)) > 1]
            return super().propose(state, budget)

    arms = [Priced("short", Lookup(8), 1, (0.05, 0.01)), Priced("long", Lookup(8), 1, (0.01, 0.05))]
    log = []
    controller = built(arms, "ucbspec", log, radius_scale=0.05)
    for _ in range(3):
        played(target, controller, prompts[:3])
        played(target, controller, prompts[:1])
    for texts, best in (("3 texts", "short"), ("1 texts", "long")):
        rounds = [line.arm for line in log if line.query == texts]
        assert rounds[len(rounds) // 2 :].count(best) > 0.8 * (len(rounds) / 2), (texts, rounds)


def test_a_new_seed_starts_new_games(target, prompts):
    controller = built([Arm("a", Lookup(3)), Arm("b", Lookup(2))], "ucbspec", [])
    played(target, controller, prompts[:2])
    before = controller.games[2]
    played(target, controller, prompts[:2])
    assert controller.games[2] is before
    played(target, controller, prompts[:2], seed=1)
    assert controller.games[2] is not before


def test_rounds_of_a_failing_drafter_are_plain_decoding(target, prompts, capsys):
    class Broken(Lookup):
        def propose(self, state, budget):
            raise RuntimeError("no")

    log = []
    controller = built([Arm("broken", Broken(3)), Arm("fine", Lookup(3))], "ucbspec", log)
    found = played(target, controller, prompts[:2])
    assert found[0].output_ids and controller.failures == sum(line.arm == "broken" for line in log) > 0
    assert {line.learnt for line in log if line.arm == "broken"} == {1.0}
    assert "broken failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("cgp-ucb", "reads prompts"), ("hedgespec", "scores"), ("router", "reads"), ("metasd-ucb", "bd")]
)
def test_policies_that_need_a_single_text_are_refused(name, told):
    with pytest.raises(UsageError, match=told):
        check_batch(["ucbspec", name], GameRecipe())
    check_batch(["ucbspec", "exp3spec", "random", "fixed"], GameRecipe())
    check_batch(["metasd-ucb"], GameRecipe(reward="throughput"))
