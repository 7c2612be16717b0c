"""A family without gradient steps: it predicts the token that most often followed the last one."""

from collections import Counter, defaultdict

import torch

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree, Score
from specctl.drafters.family import DrafterFamily

DEPTH = 3


class Followers:
    """The stored module: `after` [V], with -1 for tokens that nothing followed."""

    def __init__(self, after):
        self.after = after

    def check(self, target):
        """Every target fits."""


class Follower(Drafter):
    def __init__(self, after, depth):
        self.after, self.depth = after, depth

    def propose(self, state, budget):
        chains = [self._chain(row.ids[-1], min(self.depth, budget, row.draft_room)) for row in state.rows]
        return DraftTree.from_chains(chains, state.device)

    def _chain(self, token, count):
        chain = [token]
        while len(chain) <= count and chain[-1] >= 0:
            chain.append(self.after[chain[-1]])
        return [token for token in chain[1:] if token >= 0]

    def score(self, state, spans, depths=1):
        found = []
        for row, span in zip(state.rows, spans, strict=True):
            tokens = torch.tensor([self.after[row.ids[at - 1]] for at in span], dtype=torch.long, device=state.device)
            found.append(Score(span, tokens=tokens.view(1, -1, 1), children=(1,) * self.depth))
        return found


class FollowerFamily(DrafterFamily):
    def collect(self, texts):
        counts = defaultdict(Counter)
        for tokens, length in texts:
            for one, other in zip(tokens[length - 1 :], tokens[length:], strict=False):
                counts[one][other] += 1
        after = torch.full((1 + max(counts),), -1)
        for token, followers in counts.items():
            after[token] = followers.most_common(1)[0][0]
        return Followers(after)

    def stored_architecture(self, module):
        return {}

    def tensors(self, module):
        return {"after": module.after}

    def restore(self, config, tensors):
        return Followers(tensors["after"])

    def make_drafter(self, module, target, drafting):
        known = module.after.tolist()
        return Follower(known + [-1] * (target.vocab_size - len(known)), drafting.depth or DEPTH)


FAMILY = FollowerFamily("follower")
