"""Dispatcher of client requests, each to the server with the drafter that should have the most tokens accepted.

The arms are servers of one target with different drafters. The reward is the server's own report on its drafts, so no
request is sent twice. A text is a round, because it stays on the server where it was begun. The default policy reads
the prompt as `selection.policies.contextual` does. Hashed words take the place of the target's hidden states, which no
server returns with its answers.
"""

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from specctl import progress
from specctl.engines.proxy_messages import ServerChoice, TextCounts
from specctl.engines.records import DraftCounters
from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies import registry
from specctl.selection.policies.contextual import BETA, ArmRounds, prior_bounds
from specctl.selection.policies.policy import Arms, Array, Policy
from specctl.selection.prompt_memory import PromptMemory

POLICIES = ("cgp-ucb", "metasd-ucb", "metasd-ducb", "metasd-swucb", "random", "fixed")
"""Policies that can choose a server. The others learn from all arms at once, which no server reports, or need the
feedback of a round before the next one begins."""
FEATURES = 256  # number of buckets that words are hashed to
HEAD, TAIL = 1000, 3000  # characters that are read from the beginning and the end of a prompt
# Width for the distance of two prompts' words, in `PromptMemory`. Simulated with real prompts of two, three and seven
# domains, and one server for each (mat 3.5, and 2.0 elsewhere), the best server gets 97, 96 and 54 % of the texts 50 to
# 300; with 0.5 it gets 93, 90 and 50 %.
WIDTH = 1.0
# A server is passed over while it has more requests than `OVERLOAD_FACTOR` times the number of the least busy server,
# plus `OVERLOAD_SLACK`.
OVERLOAD_FACTOR, OVERLOAD_SLACK = 2, 8


def check(name: str) -> None:
    """Raise UsageError if a policy cannot choose a server."""
    registry.check([name])
    if name not in POLICIES:
        raise UsageError(f"{name} cannot choose among servers", f"use --choose {', '.join(POLICIES)}")


@dataclass(frozen=True)
class ModelGame:
    """The game of one model: its servers are the arms. `memory` is None if the policy does not read prompts."""

    urls: list[str]
    policy: Policy
    memory: PromptMemory | None


@dataclass(frozen=True)
class PromptChoice(ServerChoice):
    """A ranking of the servers, with the game that made it, and the prompt's features if the policy reads them."""

    game: ModelGame | None = None
    features: Array | None = None


class Dispatcher:
    """Player of a policy of `POLICIES`, with the servers of a gateway as arms.

    Each model has a game of its own: servers may list different models, and a drafter may be good for one adapter of
    the target alone."""

    def __init__(self, urls: Sequence[str], name: str, options: PolicyRecipe, seed: int):
        """`seed`: of the policy's draws. Raises UsageError like `check`."""
        check(name)
        self.urls = list(urls)
        self._name, self._options, self._seed = name, options, seed
        self._games: dict[str | None, ModelGame] = {}
        self._silent: set[str] = set()

    def _game(self, model: str | None, urls: list[str]) -> ModelGame:
        """The game of a model among these servers; a new one if other servers list the model now."""
        game = self._games.get(model)
        if game is None or game.urls != urls:
            arms = Arms(len(urls), 1, self._seed)
            memory = PromptMemory(arms.count, WIDTH) if registry.contextual(self._name) else None
            game = self._games[model] = ModelGame(urls, registry.build(self._name, arms, self._options), memory)
        return game

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int], model: str | None = None) -> PromptChoice:
        """Rank the servers by their expected reward; servers with too many requests come last.

        Args:
            in_flight: requests in flight per address, of the servers that list the model.
            model: name of the model, or None for the servers' default model. Each name takes memory.
        """
        began = perf_counter_ns()
        features = None
        game = self._game(model, [url for url in self.urls if url in in_flight])
        if game.memory is None:
            chosen = game.policy.choose()
            worth = [float(arm == chosen) for arm in range(len(game.urls))]
        else:
            features = features_of(body)
            belief = game.memory.belief(features)
            if belief is None:
                heard = zip(game.memory.texts, game.urls, strict=True)
                worth = [-float(count + in_flight[url]) for count, url in heard]
            else:
                worth = prior_bounds(belief, BETA)
        most = OVERLOAD_FACTOR * min(in_flight.values()) + OVERLOAD_SLACK
        ranked = sorted(
            zip(game.urls, worth, strict=True),
            key=lambda one: (in_flight[one[0]] > most, -one[1], in_flight[one[0]]),
        )
        return PromptChoice([url for url, _ in ranked], (perf_counter_ns() - began) / 1000, game, features)

    def learn(self, choice: ServerChoice, url: str, counts: TextCounts) -> None:
        """Learn from a text. A server that does not report its accepted tokens counts as if it had accepted none."""
        if not isinstance(choice, PromptChoice) or choice.game is None:  # the choice had failed
            return
        if counts.drafting is None and url not in self._silent:
            self._silent.add(url)
            progress.warn(
                f"{url} does not report its accepted draft tokens, so it counts as a server without a drafter; "
                "if it has one, start it with: vllm serve … --per-request-spec-decode-metrics summary"
            )
        shown, game = pass_statistics(counts), choice.game
        arm = game.urls.index(url)
        if game.memory is not None and choice.features is not None:
            others = [ArmRounds(0, 0.0, 0.0)] * len(game.urls)
            # Without the belief: it would blame the difficulty of the text for half of the only server's result.
            game.memory.learn(choice.features, None, [*others[:arm], shown, *others[arm + 1 :]])
        elif game.policy.learns == "reward":
            game.policy.reward(arm, 1 - shown.rounds / shown.total)

    def settle(self) -> None:
        """Fit the memories now, so that the next request need not wait."""
        for game in self._games.values():
            if game.memory is not None:
                game.memory.fit()


def pass_statistics(counts: TextCounts) -> ArmRounds:
    """Statistics of the target's passes over a text; a pass yields one token more than it accepts. Passes without a
    draft, such as the prefill, are in no draft counter; they follow from the number of tokens."""
    drafting = counts.drafting or DraftCounters()
    passes = max(counts.tokens - drafting.accepted, 1)  # the last draft may be accepted beyond the end of the text
    # Σ (1 + a)² over passes that accept a tokens each; Σ a² = Σ over places (2·place + 1)·(how often accepted there).
    squares = passes + 2.0 * drafting.accepted
    if drafting.accepted_at:
        squares += sum((2 * place + 1) * count for place, count in enumerate(drafting.accepted_at))
    else:  # llama.cpp reports sums only: a geometric number of mean m has the mean square m + 2 m²
        squares += drafting.accepted + 2 * drafting.accepted**2 / passes
    return ArmRounds(passes, float(counts.tokens), float(squares))


def features_of(body: Mapping[str, Any]) -> Array:
    """[FEATURES] counts of a prompt's words (or of its ids), hashed with signs (Weinberger et al. 2009) and damped."""
    values = np.zeros(FEATURES)
    for word, count in Counter(words_of(body)).items():
        hashed = zlib.crc32(word.encode())
        values[hashed % FEATURES] += count if hashed >> 31 else -count
    return np.sign(values) * np.log1p(np.abs(values))


def words_of(body: Mapping[str, Any]) -> list[str]:
    """The words of a request's prompt, in any of its forms: text, messages or token ids."""
    prompt = next((body[key] for key in ("messages", "prompt", "text", "input_ids") if body.get(key)), "")
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return [str(token) for token in [*prompt[: HEAD // 4], *prompt[HEAD // 4 :][-TAIL // 4 :]]]
    text = prompt if isinstance(prompt, str) else " ".join(message_texts(prompt))
    return re.findall(r"\w+|[^\w\s]", f"{text[:HEAD]} {text[HEAD:][-TAIL:]}".lower())


def message_texts(messages: Any) -> list[str]:
    """The texts in the messages of a conversation."""
    texts: list[str] = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts
