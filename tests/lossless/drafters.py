"""Drafters that propose anything a test needs, right or wrong. The target's text must not depend on any of these
drafters."""

import functools
import random

import torch
from transformers import AutoModelForCausalLM

from specctl.decoding.models.loading import builtin_path
from specctl.decoding.protocols import Controller, Drafter
from specctl.decoding.records import PADDING, DraftTree
from specctl.drafters.lm.drafter import FAMILY as lm


class Scripted(Drafter):
    """Drafts `script(row, budget)` = (tokens, parents) for every sequence, including finished ones."""

    def __init__(self, script, chain=True, taps=()):
        self.script, self.chain, self.taps = script, chain, taps

    def propose(self, state, budget):
        drafts = [self.script(row, budget) for row in state.rows]
        width = max(len(tokens) for tokens, _ in drafts)
        tokens = [tokens + [0] * (width - len(tokens)) for tokens, _ in drafts]
        parents = [parents + [PADDING] * (width - len(parents)) for _, parents in drafts]
        shape = (len(drafts), width)
        return DraftTree(
            torch.tensor(tokens, dtype=torch.long).view(shape),
            torch.tensor(parents, dtype=torch.long).view(shape),
            chain=self.chain,
        )


def chain_of(tokens):
    return list(tokens), list(range(-1, len(tokens) - 1))


def constant(tokens):
    """One constant chain in every round."""
    return Scripted(lambda row, budget: chain_of(tokens[:budget]))


def perfect(texts, depth=7):
    """Continues the known text of each sequence, found by its index in the batch."""
    return Scripted(lambda row, budget: chain_of(texts[row.index][len(row.ids) :][: min(depth, budget)]))


def ragged(texts, seed, vocabulary, right=0.7, taps=()):
    """Chains of random length, some of them empty; each token is right with probability `right`."""
    draw = random.Random(seed)

    def script(row, budget):
        text, start = texts[row.index], len(row.ids)
        length = draw.randint(0, min(7, budget))
        return chain_of([_token(draw, text, start + i, right, vocabulary) for i in range(length)])

    return Scripted(script, taps=taps)


def bushes(texts, seed, vocabulary, nodes=12, right=0.7, taps=()):
    """Random trees: any parent, siblings with equal tokens, right tokens anywhere, different sizes within the batch."""
    draw = random.Random(seed)

    def script(row, budget):
        text, start = texts[row.index], len(row.ids)
        tokens, parents, depth = [], [], []
        for node in range(draw.randint(0, min(nodes, budget))):
            parent = draw.choice([-1, node - 1, draw.randint(-1, node - 1)])
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
            parents.append(parent)
            tokens.append(_token(draw, text, start + depth[node], right, vocabulary))
        return tokens, parents

    return Scripted(script, chain=False, taps=taps)


def full_tree(texts):
    """A tree that fills the budget: the right chain, with a wrong sibling beside every node."""

    def script(row, budget):
        right = texts[row.index][len(row.ids) :]
        tokens, parents = [], []
        for node in range(budget):
            depth, wrong = divmod(node, 2)
            tokens.append(0 if wrong or depth >= len(right) else right[depth])
            parents.append(2 * (depth - 1) if depth else -1)
        return tokens, parents

    return Scripted(script, chain=False)


def _token(draw, text, position, right, vocabulary):
    known = position < len(text) and draw.random() < right
    return text[position] if known else draw.randrange(vocabulary)


class Rotate(Controller):
    """Plays its drafters in turn, so that each of them is idle for some rounds and then has to catch up."""

    def __init__(self, drafters):
        self.drafters, self.round = drafters, 0

    def choose(self, state):
        self.round += 1
        return self.drafters[self.round % len(self.drafters)]

    def observe(self, state, result):
        pass


def own_weights(target, noise=0.0):
    """The target itself as an `lm` drafter, with noise on its weights of `noise` times their standard deviation."""
    architecture, tensors = _disturbed(builtin_path() if target.name == "builtin" else target.name, noise)
    return lm.restore({"architecture": architecture, "target": target.identity}, tensors)


@functools.cache
def _disturbed(path, noise):
    """The target's architecture and its tensors with noise, from the files at `path`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: weight + noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
    }
    return model.config.to_diff_dict(), tensors
