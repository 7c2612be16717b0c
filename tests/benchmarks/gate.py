"""Compare constants of the hybrid gate on recorded proposals.

    python -m tests.benchmarks.gate --target M --head DIR --text NAME_OR_DIR --prompts 'DIR/{domain}.train.jsonl' \\
        [--without DISTILLED …] [--limit 6] [--tokens 80] [--temperature 0] DOMAIN …

The trees of the head and of the text drafter are recorded at every position of the target's texts. Rounds are then
played on the record without the target, within seconds. `--without` leaves out prompts of distilled directories.

For each domain it prints tokens per cost (in plain rounds, with the costs of this machine) and tokens per pass of

- the text drafter with its default number of nodes,
- the hybrid that never runs its head,
- the hybrid with separate statistics for each text, and
- the hybrid with common statistics, with each domain as a stream of `ROUNDS` times its texts.

Over all positions it prints the ratios of outcomes to claims by eighths of the claim, and the tokens that the head
adds to the text drafter.
"""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Request, empty_draft
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import load_target
from specctl.distillation import store
from specctl.distillation.prompts import read_prompts
from specctl.drafters import pool
from specctl.drafters.hybrid.candidates import Calibration, Candidates
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import HEAD, TEXT, GateStatistics
from specctl.drafters.text.suffix import NODES
from specctl.drafters.tree import ProposedTree
from specctl.recipe import DataRecipe, DraftingRecipe
from tests.toys.decoding import decode

ROUNDS = 4


class Text(NamedTuple):
    """A text of the target, with the proposals of head and text drafter at each position from `start` on."""

    request: Request
    ids: list[int]
    start: int
    heads: list[ProposedTree]
    texts: list[ProposedTree]


class Recorder(Drafter):
    """A drafter that drafts nothing and records the proposals of the parts of a hybrid."""

    def __init__(self, hybrid: Hybrid):
        self.hybrid, self.taps = hybrid, hybrid.taps
        self.heads: list[ProposedTree] = []
        self.texts: list[ProposedTree] = []

    def propose(self, state, budget):
        self.heads += self.hybrid.head.propose_candidates(state, budget, lambda joint: True)
        self.texts += self.hybrid.text.propose_trees(state, self.hybrid.offered)
        return empty_draft(state.batch, state.device)

    def advance(self, state):
        self.hybrid.advance(state)

    def invalidate(self, state):
        self.hybrid.invalidate(state)

    def lag(self, state):
        return self.hybrid.lag(state)


def depths(tree: ProposedTree) -> list[int]:
    found: list[int] = []
    for parent in tree.parents:
        found.append(found[parent] + 1 if parent >= 0 else 1)
    return found


class Played(Drafter):
    """A part of a hybrid that proposes the tree recorded for the text's length."""

    taps = ()

    def __init__(self, trees: str, calibration: tuple[float, ...] = ()):
        self.trees, self.calibration = trees, calibration

    def tree(self, state) -> ProposedTree:
        (row,) = state.rows
        return getattr(state.text, self.trees)[len(row.ids) - state.text.start]

    def propose_trees(self, state, nodes):
        return [ProposedTree(*(part[:nodes] for part in self.tree(state)))]

    def lag(self, state):
        return [len(state.rows[0].ids) - state.memory.get("read", 0)]

    def propose_candidates(self, state, budget, pays):
        tree = self.tree(state)
        level, joint, deepest = depths(tree), [], 1
        for parent, probability in zip(tree.parents, tree.probabilities, strict=True):
            joint.append(math.log(max(probability, 1e-9)) + (joint[parent] if parent >= 0 else 0.0))
        while deepest < max(level, default=0):
            if not pays([max(value for value, depth in zip(joint, level, strict=True) if depth == deepest)]):
                break
            deepest += 1
        kept = sum(depth <= deepest for depth in level)  # levels were recorded one after another
        return [ProposedTree(*(part[:kept] for part in tree))]


def play(texts: list[Text], hybrid: Hybrid, costs: Costs, nodes: int | None) -> tuple[float, float]:
    """Return (tokens per cost, tokens per pass) of a stream. With `nodes`, only the text drafter drafts that many
    nodes."""
    tokens, spent, rounds = 0, 0.0, 0
    for text in texts:
        row = SimpleNamespace(ids=text.ids[: text.start], request=text.request, target_passes=0, draft_room=0)
        state = SimpleNamespace(rows=[row], live=[0], batch=1, exact_rows=0, device="cpu", memory={}, text=text)
        while len(row.ids) < text.start + len(text.heads):
            row.draft_room = len(text.ids) - len(row.ids) - 1
            levels = 0
            if nodes is None:
                draft = hybrid.propose(state, 62)
                links = draft.tokens[0].tolist(), draft.parents[0].tolist()
                levels = state.memory[hybrid].rows[0].pending.levels
            else:
                links = hybrid.text.propose_trees(state, nodes)[0][:2]
            tree = Candidates()
            tree.add(ProposedTree(*links, [1.0] * len(links[0])), 0, Calibration([1.0] * 8))
            accepted = tree.accepted_claims(text.ids[len(row.ids) :], 0)
            at = costs.at(len(row.ids))
            spent += (at.round(len(links[0]) + 1) + at.drafting(levels)) / at.round(1)
            if levels:
                spent += at.read * (len(row.ids) - state.memory.get("read", 0))
                state.memory["read"] = len(row.ids)
            row.ids = text.ids[: len(row.ids) + accepted + 1]
            row.target_passes += 1
            tokens, rounds = tokens + accepted + 1, rounds + 1
    return tokens / spent, tokens / rounds


def outcomes(texts: list[Text]) -> str:
    """Return the ratios of outcomes to claims for both drafters, and the head's mean gain in tokens, over all
    positions."""
    sums, gain, positions = [[[0.0, 0] for _ in range(8)] for _ in (TEXT, HEAD)], 0, 0
    for text in texts:
        for n, trees in enumerate(zip(text.texts, text.heads, strict=True)):
            both, after = Candidates(), text.ids[text.start + n :]
            for who, tree in enumerate(trees):
                both.add(tree, who, Calibration([1.0] * 8))
            for claim, came_true in both.outcomes(after):
                part = sums[claim.drafter][min(int(claim.probability * 8), 7)]
                part[0] += claim.probability
                part[1] += came_true
            along = Candidates()  # one drafter with the candidates of both
            along.add(ProposedTree(both.tokens, both.parents, both.joint), 0, Calibration([1.0] * 8))
            gain += along.accepted_claims(after, 0) - both.accepted_claims(after, TEXT)
            positions += 1
    lines = [
        f"{name:16}" + " ".join(f"{true / claimed:6.2f}" if claimed else f"{'-':>6}" for claimed, true in sums[who])
        for name, who in (("text drafter", TEXT), ("head", HEAD))
    ]
    return "\n".join([*lines, f"{'added by head':16}{gain / positions:6.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("target", "head", "text", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("domains", nargs="+")
    asked = parser.parse_args()
    target = load_target(asked.target, device="cpu")
    drafter = pool.load_drafter(f"{asked.head}+{asked.text}", target, DraftingRecipe())
    assert isinstance(drafter, Hybrid)
    seen = {tuple(row["prompt_ids"]) for path in asked.without for row in store.read(Path(path))}
    head, text = Played("heads"), Played("texts", drafter.text.calibration)
    sampling, recorded = Sampling(asked.temperature, 0, 1.0), []
    print(f"{'domain':16}{'nodes alone':>20}{'head never asked':>20}{'hybrid':>20}{'one stream':>20}")
    for domain in asked.domains:
        data = DataRecipe(domain=[domain], prompts=asked.prompts)
        prompts = [target.render(prompt.messages) for prompt in read_prompts(data, domain, sample=True)]
        texts = []
        for ids in [ids for ids in prompts if tuple(ids) not in seen][: asked.limit]:
            recorder = Recorder(drafter)
            options = {"sampling": sampling, "max_new_tokens": asked.tokens, "seeds": [0], "slots": 1}
            (decoded,) = decode(target, [ids], drafter=recorder, **options)
            request, whole = Request(ids, sampling, asked.tokens), [*ids, *decoded.output_ids]
            texts.append(Text(request, whole, len(ids) + 1, recorder.heads, recorder.texts))
        never = Hybrid(head, text, drafter.costs)
        never._asks = lambda *_: False
        found = [
            play(texts * ROUNDS, never, drafter.costs, NODES["cpu"]),
            play(texts * ROUNDS, never, drafter.costs, None),
            play(texts, Hybrid(head, text, drafter.costs), drafter.costs, None),
            play(texts * ROUNDS, Hybrid(head, text, drafter.costs, GateStatistics()), drafter.costs, None),
        ]
        print(f"{domain:16}" + "".join(f"{rate:13.3f} ({mat:4.2f})" for rate, mat in found), flush=True)
        recorded += texts
    print(outcomes(recorded))


if __name__ == "__main__":
    main()
