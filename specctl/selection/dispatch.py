"""Requests of clients, each sent to the server whose drafter is expected to be accepted furthest in its text.

The arms are servers of one target that draft with different drafters. The reward is what a server's answer says of its
own drafts, so nobody has to be asked twice; a text is a round, as it stays where it was begun. The default reads the
prompt as `selection.policies.contextual` does, where hashed words stand in for the target's states, which no server
hands out with its answers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from specctl import progress
from specctl.engines.exchanges import TextCounts
from specctl.engines.proxy import ServerOrder
from specctl.engines.records import Drafting
from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies import registry
from specctl.selection.policies.contextual import BETA, Shown, unplayed
from specctl.selection.policies.policy import Arms, Array
from specctl.selection.prompt_memory import PromptMemory

POLICIES = ("cgp-ucb", "metasd-ucb", "metasd-ducb", "metasd-swucb", "random", "fixed")
"""Policies that can play with requests: the others learn from all arms at once, which no server tells, or count on
hearing of a round before the next one begins."""
FEATURES = 256  # that words are hashed to
HEAD, TAIL = 1000, 3000  # characters of a prompt that are read, of its beginning and of its end
# Of the distance of two prompts' words, in `PromptMemory`. Simulated with real prompts of two, three and seven domains,
# and a server of each (mat 3.5, and 2.0 elsewhere), the best one has 97, 96 and 54 % of the texts 50 to 300; with 0.5
# 93, 90 and 50 %.
WIDTH = 1.0
# A server is passed over while it has more requests than so many times those of the least busy one, and so many more.
TIMES, MORE = 2, 8


def check(names: Sequence[str]) -> None:
    """Raise UsageError where a policy cannot play with requests."""
    registry.check([*names])
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"{name} cannot route requests among servers", f"--algo {', '.join(POLICIES)}")


@dataclass(frozen=True)
class Routed:
    """A text that was written: by whom, in how many passes of the target, and what choosing took.

    Attributes:
        accepted: drafted tokens among the `tokens`; None where the server does not say.
    """

    url: str
    tokens: int
    passes: int
    accepted: int | None
    decide_us: float


@dataclass(frozen=True)
class PromptOrder(ServerOrder):
    """A choice, with what it was made by."""

    features: Array | None
    decide_us: float


class Dispatcher:
    """The `Dispatch` of a proxy that plays a policy of `POLICIES`, with the servers as arms."""

    def __init__(
        self, urls: Sequence[str], name: str, options: PolicyRecipe, seed: int, routed: Callable[[Routed], None]
    ):
        """`routed` is told of every text. Raises UsageError as `check`."""
        check([name])
        self.urls, self.routed = list(urls), routed
        arms = Arms(len(self.urls), 1, seed)
        self.memory = PromptMemory(arms.count, WIDTH) if registry.contextual(name) else None
        self.policy = registry.build(name, arms, options)
        self._silent: set[str] = set()

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> PromptOrder:
        """The servers by what is expected of them, those with too many requests last."""
        began = perf_counter_ns()
        features = None
        if self.memory is None:
            chosen = self.policy.choose()
            worth = [float(arm == chosen) for arm in range(len(self.urls))]
        else:
            features = features_of(body)
            belief = self.memory.belief(features)
            texts = [heard + in_flight[url] for heard, url in zip(self.memory.texts, self.urls, strict=True)]
            worth = [-float(count) for count in texts] if belief is None else unplayed(belief, BETA)
        most = TIMES * min(in_flight.values()) + MORE
        ranked = sorted(
            zip(self.urls, worth, strict=True),
            key=lambda one: (in_flight[one[0]] > most, -one[1], in_flight[one[0]]),
        )
        return PromptOrder([url for url, _ in ranked], features, (perf_counter_ns() - began) / 1000)

    def answered(self, choice: ServerOrder, url: str, counts: TextCounts) -> None:
        """Learn from a text. Where a server does not say what it accepted, it counts as if that were nothing."""
        assert isinstance(choice, PromptOrder)
        if counts.drafting is None and url not in self._silent:
            self._silent.add(url)
            progress.warn(
                f"{url} does not say which drafted tokens it accepts, and counts as a server without a drafter: "
                f"vllm serve … --per-request-spec-decode-metrics summary"
            )
        shown = passes_of(counts)
        arm = self.urls.index(url)
        if self.memory is not None and choice.features is not None:
            others = [Shown(0, 0.0, 0.0)] * len(self.urls)
            # Without the belief, which would blame a hard text for half of what its only server was worth.
            self.memory.learn(choice.features, None, [*others[:arm], shown, *others[arm + 1 :]])
            self.memory.fit()  # the next request need not wait for it
        elif self.policy.learns == "reward":
            self.policy.reward(arm, 1 - shown.rounds / shown.total)
        accepted = None if counts.drafting is None else counts.drafting.accepted
        self.routed(Routed(url, counts.tokens, shown.rounds, accepted, choice.decide_us))


def passes_of(counts: TextCounts) -> Shown:
    """The target's passes over a text, with the tokens of each: one more than it accepted. Passes that had no draft,
    as the one over the prompt, are in no counter of drafts, and are those that the tokens need besides."""
    drafting = counts.drafting or Drafting()
    passes = max(counts.tokens - drafting.accepted, 1)  # of a last draft more may be accepted than there was room for
    # Σ (1 + a)² over passes that accept a tokens each; Σ a² = Σ over places (2·place + 1)·(how often accepted there).
    squares = passes + 2 * drafting.accepted
    squares += sum((2 * place + 1) * count for place, count in enumerate(drafting.accepted_at))
    return Shown(passes, float(counts.tokens), float(squares))


def features_of(body: Mapping[str, Any]) -> Array:
    """[FEATURES] counts of a prompt's words (or of its ids), hashed with signs (Weinberger et al. 2009) and damped."""
    values = np.zeros(FEATURES)
    for word in words_of(body):
        hashed = zlib.crc32(word.encode())
        values[hashed % FEATURES] += 1 if hashed >> 31 else -1
    return np.sign(values) * np.log1p(np.abs(values))


def words_of(body: Mapping[str, Any]) -> list[str]:
    """The words of a request's prompt, wherever its interface has it: text, messages, or ids as they are."""
    prompt = next((body[key] for key in ("messages", "prompt", "text", "input_ids") if body.get(key)), "")
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return [str(token) for token in [*prompt[: HEAD // 4], *prompt[HEAD // 4 :][-TAIL // 4 :]]]
    text = prompt if isinstance(prompt, str) else " ".join(said(prompt))
    return re.findall(r"\w+|[^\w\s]", f"{text[:HEAD]} {text[HEAD:][-TAIL:]}".lower())


def said(messages: Any) -> list[str]:
    """The texts in the messages of a conversation."""
    texts: list[str] = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts
