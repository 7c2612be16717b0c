"""Two verdicts on updates, and what became of them: python -m tests.benchmarks.verdict --algo ogd-eagle3 --init D …

The options are those of `specctl online`, which runs with them. Of every update its candidate, the weights at the end
of the way, is compared with the weights before by the texts held out: by their loss, which is what decides, and by
their accepted length; and by the loss of the texts held out of the last `CHUNKS` chunks, which are learnt from all the
same with the next one unless the first option is --reservoir. The next chunk's texts then tell what the candidate was
worth. All verdicts are `adaptation.skewed_t_test.mean_gain_is_significant` at the learner's level, of one candidate.
"""

import sys
from collections import deque
from dataclasses import dataclass, field
from statistics import correlation, fmean

import numpy as np
import torch
from torch.func import functional_call

from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.skewed_t_test import mean_gain_is_significant
from specctl.adaptation.updates import holdout
from specctl.adaptation.updates.ensemble import Ensemble
from specctl.recipe.learner import LearnerRecipe
from specctl.training.expected_length import hits_of

LEVEL = LearnerRecipe().level
CHUNKS = 3  # whose texts are in the reservoir


@dataclass
class Update:
    """An update: weights before and at the end of the way, what the texts held out gain, what those of the next chunk
    do: each by text."""

    before: torch.Tensor
    after: torch.Tensor
    by_loss: list[float]
    by_length: list[float]
    by_reservoir: list[float]
    worth: list[float] = field(default_factory=list)


@torch.no_grad()
def accepted(pupil: OnlineDrafter, w: torch.Tensor, example) -> float:
    """Draft tokens that weights w have accepted behind a token of a text, in the mean."""
    module, parameters = pupil.trainable.module.eval(), pupil.objective.parameters(w)
    counts = hits_of(
        pupil.trainable, lambda *args, **more: functional_call(module, parameters, args, more), pupil.buffer, example
    )
    return float(counts[:, 0].sum() / counts[0, 1])


def watched(updates: list[Update], *, apart: bool) -> None:
    """Have every update noted, and judged by the chunk after it; `apart`: texts that judge are never learnt from."""
    texts_of, pupils, reservoir = {}, [], deque(maxlen=CHUNKS)
    batch, settled, learn = OnlineDrafter._batch, Ensemble._settled, OnlineDrafter.learn
    texts = OnlineDrafter._texts

    def noted(self, examples, step):
        made = batch(self, examples, step)
        texts_of[id(made)] = made, examples
        pupils[:] = [self]
        return made

    def judged(self, descents, held):
        (pupil,), (descent,) = pupils, descents
        before, after = (descent.at(place).clone() for place in (holdout.STAY, holdout.WHOLE))
        reservoir.append(held)
        losses = [pupil.objective.losses([before, after], [text]) for chunk in reservoir for text in chunk]
        gains = [float(old - new) for old, new in losses]
        texts = [example for text in held for example in texts_of[id(text)][1]]
        lengths = [accepted(pupil, after, one) - accepted(pupil, before, one) for one in texts]
        updates.append(Update(before, after, gains[-len(held) :], lengths, gains))
        texts_of.clear()
        return settled(self, descents, held)

    def told(self, acceptance, *, no_time=False):
        if updates and not updates[-1].worth:
            last = updates[-1]
            fresh = [example for example in self.buffer.examples("all") if example.index >= self._seen]
            last.worth = [accepted(self, last.after, one) - accepted(self, last.before, one) for one in fresh]
        return learn(self, acceptance, no_time=no_time)

    OnlineDrafter._batch, Ensemble._settled, OnlineDrafter.learn = noted, judged, told
    if apart:
        OnlineDrafter._texts = lambda self: (texts(self)[0], [])


def main() -> None:
    from specctl.cli.main import app

    updates: list[Update] = []
    options = sys.argv[1:]
    apart = options[:1] == ["--reservoir"]
    watched(updates, apart=apart)
    try:
        app(["online", *options[apart:]])
    except SystemExit as end:
        if end.code:
            raise
    known = [update for update in updates if update.worth]
    worth = [fmean(update.worth) for update in known]
    print(f"{len(known)} updates, {sum(gain > 0 for gain in worth)} of them good for the next chunk")
    for name in ("by_loss", "by_length", "by_reservoir"):
        gains = [getattr(update, name) for update in known]
        taken = [len(some) > 1 and mean_gain_is_significant(np.array([some]), LEVEL)[0] for some in gains]
        good = sum(worth > 0 for worth, took in zip(worth, taken, strict=True) if took)
        told = correlation([fmean(some) for some in gains], worth)
        print(f"{name}: {sum(taken)} taken, {good} of them good; correlation with what they were worth {told:.2f}")


if __name__ == "__main__":
    main()
