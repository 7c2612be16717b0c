"""Target features that an engine computes: its hidden states of the training texts, made into what our own forward
would have given. The forward of the target in this process runs over one text only, to which the engine's is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from specctl.decoding.models.loading import location
from specctl.decoding.target import Target
from specctl.engines.client import Client
from specctl.engines.records import EngineError, Refusal, Wanted
from specctl.engines.registry import DIALECTS
from specctl.errors import CheckpointError, UsageError
from specctl.progress import Progress, interrupts, log
from specctl.recipe import ServerRecipe
from specctl.training.example import Example
from specctl.training.feature_files import Features

SAME = 0.15  # of a state's length: what other kernels, bf16 and fp8 weights make of it is less, another layer is more


class OwnForward(Protocol):
    """The features that this process would compute itself: `FeatureStore`."""

    target: Target
    taps: tuple[int, ...]

    def compute(self, examples: list[Example]) -> list[Features]: ...
    def features(self, example: Example, hidden: Tensor, tapped: Tensor | None) -> Features: ...


def wanted(target: str, revision: str | None, taps: tuple[int, ...], layers: int, width: int) -> Wanted:
    """The states that features of `taps` are made of, for a target of so many layers. Its last state is never among
    the others: `transformers` has it behind the final norm, engines before it, or after it."""
    return Wanted(location(target), revision, tuple(sorted({*taps, layers})), width)


def commands(recipe: ServerRecipe, states: Wanted) -> list[str]:
    """How a server that hands these states out is started, for each engine that can."""
    names = DIALECTS if recipe.engine == "auto" else [recipe.engine]
    return [command for name in names if (command := DIALECTS[name].capturing(states)) is not None]


def served(
    store: OwnForward, shards: dict[int, list[Example]], recipe: ServerRecipe, processes: int, bar: Progress
) -> Iterator[tuple[int, dict[int, Features], dict[str, str]]]:
    """Features of every shard as it is complete: its number, features by example, and who computed them.

    Args:
        shards: the examples of each, of which there are some.
        processes: those of this run, which share the requests that the recipe allows.

    Raises:
        EngineError: a server does not give what is needed, or goes on failing.  CheckpointError: it serves another
        target.  UsageError: none is named.  Interrupted.
    """
    target = store.target
    states = wanted(target.name, target.identity["revision"], store.taps, target.num_layers, target.hidden_size)
    with _asked(recipe, states, processes) as client:
        client.compare(target)
        client.check_states(states)
        origin = {"server": ", ".join(sorted({f"{one.facts.engine} {one.facts.version}" for one in client.servers}))}
        texts = [(number, example) for number, examples in shards.items() for example in examples]
        check_same(store, client, states, max((example for _, example in texts), key=lambda e: len(e.tokens)))
        done: dict[int, dict[int, Features]] = {number: {} for number in shards}
        tokens = 0
        for place, rows in client.states([_sent(example) for _, example in texts], states):
            number, example = texts[place]
            done[number][example.index] = made(store, client, states, example, rows)
            tokens += len(example.tokens) - 1
            bar.update(1, tokens=tokens)
            if len(done[number]) == len(shards[number]):
                yield number, done.pop(number), origin
        interrupts.check()


@contextmanager
def _asked(recipe: ServerRecipe, states: Wanted, processes: int) -> Iterator[Client]:
    """A client of the recipe's servers. Where there are none, the error says how one is started."""
    how = "; or ".join(commands(recipe, states)) or "vLLM hands out what this drafter needs"
    if not recipe.urls:
        raise UsageError("features.mode=server needs a server: --features-from http://host:8000", f"start one: {how}")
    share = recipe.model_copy(update={"concurrency": max(1, recipe.concurrency // processes)})
    with ExitStack() as stack:
        try:
            client = stack.enter_context(Client(share))
        except EngineError as error:
            raise EngineError(error.message, error.hint or f"start one: {how}") from error
        yield client


def _sent(example: Example) -> list[int]:
    """The tokens whose states are needed: nothing needs that of the last one."""
    return example.tokens[:-1]


def made(store: OwnForward, client: Client, states: Wanted, example: Example, rows: Tensor | Refusal) -> Features:
    """Features of an example from an engine's states [S−1, layers, H]. EngineError where it has refused the text."""
    if isinstance(rows, Refusal):
        raise EngineError(
            f"a server refuses the text of prompt {example.prompt_id} ({len(example.tokens)} tokens): {rows.reason}",
            "; or ".join([f"start one: {command}" for command in commands(client.recipe, states)])
            + "; for texts that are too long lower max_length",
        )
    target = store.target
    rows = rows.to(target.device)
    with torch.inference_mode():
        last = rows[:, -1].to(target.dtype) if client.servers[0].dialect.NORMED else target.model.normed(rows[:, -1])
        parts = {tap: rows[:, place].to(target.dtype) for place, tap in enumerate(states.ids[:-1])}
        parts[target.num_layers] = last
        tapped = torch.cat([parts[tap] for tap in store.taps], -1) if store.taps else None
    return store.features(example, last, tapped)


def check_same(store: OwnForward, client: Client, states: Wanted, example: Example) -> None:
    """The features of one text are those of our own forward, at every server; asked twice, so that the second answer
    may come from a cache. CheckpointError where they are not."""
    (own,) = store.compute([example])
    count = len(client.servers)
    worst = 0.0
    for _ in range(2):
        for _, rows in client.states([_sent(example)] * count, states):  # one each: the idlest server is asked
            theirs = made(store, client, states, example, rows)
            worst = max([worst, *differences(own, theirs, len(store.taps))])
            if worst > SAME:
                raise CheckpointError(
                    f"states from {', '.join(one.url for one in client.servers)} are not those of target "
                    f"{store.target.name}: they differ by {worst:.0%}; other weights, or other layers than "
                    f"{list(states.ids)}",
                    "; or ".join(f"start it with: {command}" for command in commands(client.recipe, states)),
                )
    interrupts.check()
    log(f"states of the server differ from the target's own by {worst:.2g} of their length")


def differences(own: Features, theirs: Features, taps: int) -> list[float]:
    """The difference of every tapped layer's states, and of the final ones, as a share of their length: that of the
    median token, since the first ones of some models are of another size than all others."""
    pairs = [(own.teacher, theirs.teacher)]
    pairs += zip(own.taps.chunk(taps, -1), theirs.taps.chunk(taps, -1), strict=True) if taps else []
    shares = [((b.float() - a.float()).norm(dim=-1) / a.float().norm(dim=-1).clamp_min(1e-12)) for a, b in pairs]
    return [share.median().item() for share in shares]
