"""Target features computed by a server: the engine's hidden states of the training texts, in the form of our own
forward.

If the target's layers are loaded here, one text also runs through our own forward, and both results are compared.
Otherwise, the vocabulary head here must turn the engine's last states into the log probabilities that the engine
reports.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from specctl import regular_files
from specctl.decoding.models.loading import is_gguf, location, servable
from specctl.decoding.target import Target
from specctl.engines.client import Client
from specctl.engines.endpoints import distance
from specctl.engines.records import EngineError, HiddenStatesSpec, Refusal
from specctl.engines.registry import DIALECTS
from specctl.errors import CheckpointError, UsageError
from specctl.progress import Progress, interrupts, log
from specctl.recipe import FeatureRecipe, ServerRecipe
from specctl.training.example import Author, Example
from specctl.training.feature_files import Features

# Nats, mean over the probe's tokens: bf16 causes 0.01, fp8 0.03, the layer before the last 1.
MAX_LOGPROB_DISTANCE = 0.1
# Least share of the next tokens that is predicted: a model's own texts give 0.6 … 1, other prose 0.5, chance 0.
MIN_PREDICTED = 1 / 3
FILE_HINT = "write one address per line, such as http://host:8000; server.wait_s waits for the first one"
PROBED_TEXTS = 8  # number of texts that `check_plausible` asks for
# Share of a state's length: other kernels, bf16 and fp8 weights differ by less, another layer by more.
MAX_STATE_DIFFERENCE = 0.15


class OwnForward(Protocol):
    """Interface of `FeatureStore`, which computes features in this process."""

    target: Target
    taps: tuple[int, ...]

    def compute(self, examples: list[Example]) -> list[Features]: ...
    def features(self, example: Example, hidden: Tensor, tapped: Tensor | None) -> Features: ...


def needed_states(
    target: str, revision: str | None, taps: tuple[int, ...], layers: int, width: int
) -> HiddenStatesSpec:
    """The states from which features of `taps` are made, for a target with `layers` layers and hidden size `width`. The
    last layer is always requested and never used as a plain tap: `transformers` gives its state after the final norm,
    engines before or after the norm."""
    model = servable(target) if is_gguf(target) else location(target)  # a GGUF file's `location` has no weights
    return HiddenStatesSpec(model, revision, tuple(sorted({*taps, layers})), width)


def states_of(store: OwnForward, examples: list[Example]) -> HiddenStatesSpec:
    """The states from which the features of a store's examples are made."""
    target, revision = store.target, store.target.identity["revision"]
    states = needed_states(target.name, revision, store.taps, target.num_layers, target.hidden_size)
    return with_adapters(states, [Author(example.adapter, example.model) for example in examples])


def with_adapters(states: HiddenStatesSpec, authors: Iterable[Author]) -> HiddenStatesSpec:
    """The states with the models that wrote the texts, for the command that serves them."""
    models = {author.model: author.adapter for author in authors if author.model is not None}
    return replace(states, adapters=tuple(models.items()))


def by_model(client: Client, examples: list[Example], states: HiddenStatesSpec) -> dict[str | None, Client]:
    """The client of each model that wrote some of `examples`. UsageError if a server does not list one of them."""
    try:
        return {
            model: client if model is None else client.with_model(model)
            for model in dict.fromkeys(example.model for example in examples)
        }
    except UsageError as error:
        raise unserved(error, client.recipe, states) from error


def check_models(recipe: FeatureRecipe, states: HiddenStatesSpec) -> list[str]:
    """Check that the servers list every model that wrote texts. Returns the addresses that do not respond.

    Raises UsageError: a server does not list a model, or the recipe's file of servers is wrong.
    """
    silent: list[str] = []
    for url in addresses(recipe):
        asked = recipe.server.model_copy(update={"urls": [url], "wait_s": 0.0})
        try:
            with Client(asked) as client:
                for model, _ in states.adapters:
                    client.with_model(model)
        except EngineError:
            silent.append(url)
        except UsageError as error:
            raise unserved(error, recipe.server, states) from error
    return silent


def unserved(error: UsageError, recipe: ServerRecipe, states: HiddenStatesSpec) -> UsageError:
    """The error for a server that does not list a model, with the command that starts one."""
    return UsageError(error.message, f"{error.hint}; {start_hint(recipe, states)}")


def commands(recipe: ServerRecipe, states: HiddenStatesSpec) -> list[str]:
    """Commands that start a server with these states, one for each engine that can provide them."""
    names = DIALECTS if recipe.engine == "auto" else [recipe.engine]
    return [command for name in names if (command := DIALECTS[name].capture_command(states)) is not None]


def addresses(recipe: FeatureRecipe) -> list[str]:
    """Addresses of the servers: `server.urls`, or the lines of the file `servers` that are neither empty nor comments
    (#). There is none only while `server.wait_s` allows the file to be missing or empty.

    Raises UsageError: the file is unreadable, names no server, or has a line that is no address.
    """
    path = recipe.servers
    if path is None:
        return recipe.server.urls
    try:
        lines = [line.strip() for line in regular_files.read_bytes(path).decode().splitlines()]
        found = ServerRecipe(urls=[line for line in lines if line and not line.startswith("#")]).urls
        problem = "it names no server"
    except FileNotFoundError:
        found, problem = [], "there is no such file"
    except ValidationError as error:
        raise UsageError(
            f"features.servers={path}: {error.errors()[0]['msg'].removeprefix('Value error, ')}", FILE_HINT
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"features.servers={path}: {error}", FILE_HINT) from error
    if not found and not recipe.server.wait_s:
        raise UsageError(f"features.servers={path}: {problem}", FILE_HINT)
    return found


def served_features(
    store: OwnForward, shards: dict[int, list[Example]], recipe: ServerRecipe, processes: int, bar: Progress
) -> Iterator[tuple[int, dict[int, Features], dict[str, str]]]:
    """Yield each shard when all its examples are done: its number, its features by example, and the servers that
    computed them.

    Args:
        shards: the examples of each shard, by number; not empty.
        processes: number of processes in this run, which share the concurrent requests that the recipe allows.

    Raises:
        EngineError: a server does not give the needed states, or keeps failing.
        CheckpointError: a server serves another target.
        UsageError: the recipe names no server, or a server does not list a model that wrote texts.
        Interrupted: a signal arrived.
    """
    everything = [example for examples in shards.values() for example in examples]
    states = states_of(store, everything)
    if not recipe.urls:
        raise no_server("server", recipe, states)
    with ExitStack() as stack:
        try:
            client = stack.enter_context(Client(own_share(recipe, processes)))
        except EngineError as error:
            hint = "; ".join(filter(None, (error.hint, start_hint(recipe, states))))
            raise EngineError(error.message, hint) from error
        origin = {"server": ", ".join(sorted({f"{one.facts.engine} {one.facts.version}" for one in client.servers}))}
        clients = by_model(client, everything, states)
        for model, asked in clients.items():
            check_states(store, asked, states, [example for example in everything if example.model == model])
        tokens = 0
        for model, asked in clients.items():
            # Pieces of one text are neighbors: the server is asked for the text once.
            texts = [
                (number, list(parts))
                for number, examples in shards.items()
                if examples[0].model == model  # one model has written all texts of a shard
                for _, parts in groupby(examples, lambda example: id(example.text))
            ]
            done: dict[int, dict[int, Features]] = {number: {} for number, _ in texts}
            with closing(asked.states([tokens_to_send(parts[-1]) for _, parts in texts], states)) as answers:
                for place, rows in answers:
                    number, parts = texts[place]
                    for example in parts:
                        made = to_features(store, asked, states, example, own_rows(example, rows))
                        done[number][example.index] = made
                    tokens += parts[-1].stop - 1
                    bar.update(len(parts), tokens=tokens)
                    if len(done[number]) == len(shards[number]):
                        yield number, done.pop(number), origin
            interrupts.check()


def no_server(mode: str, recipe: ServerRecipe, states: HiddenStatesSpec) -> UsageError:
    """The error for a features.mode that needs servers, without any."""
    return UsageError(
        f"features.mode={mode} needs a server: --features-from http://host:8000", start_hint(recipe, states)
    )


def start_hint(recipe: ServerRecipe, states: HiddenStatesSpec) -> str:
    """Hint that shows how to start a server with these states."""
    how = "; or ".join(commands(recipe, states)) or "vLLM provides the states that this drafter needs"
    return f"start one: {how}"


def own_share(recipe: ServerRecipe, processes: int) -> ServerRecipe:
    """The recipe of one of several processes, which share the concurrent requests."""
    return recipe.model_copy(update={"concurrency": max(1, recipe.concurrency // processes)})


def tokens_to_send(example: Example) -> list[int]:
    """Tokens to send to the server: the text before the example's last token. No feature needs the state of that
    token."""
    return list(example.text[: example.stop - 1])


def own_rows(example: Example, rows: Tensor | Refusal) -> Tensor | Refusal:
    """States [S−1, layers, H] of an example, from the states of the tokens that were sent for it, or for a later piece
    of its text."""
    return rows if isinstance(rows, Refusal) else rows[example.start : example.stop - 1]


def to_features(
    store: OwnForward, client: Client, states: HiddenStatesSpec, example: Example, rows: Tensor | Refusal
) -> Features:
    """Make the features of an example from an engine's states [S−1, layers, H]. EngineError if the engine refused the
    text."""
    if isinstance(rows, Refusal):
        raise EngineError(
            f"a server rejects the sequence of prompt {example.prompt_id} ({example.stop} tokens): {rows.reason}",
            "; or ".join([f"start one: {command}" for command in commands(client.recipe, states)])
            + "; if the sequence is too long, lower max_length",
        )
    target = store.target
    rows = rows.to(target.device)
    with torch.inference_mode():
        last = final_states(target, client, rows)
        parts = {tap: rows[:, place].to(target.dtype) for place, tap in enumerate(states.ids[:-1])}
        parts[target.num_layers] = last
        tapped = torch.cat([parts[tap] for tap in store.taps], -1) if store.taps else None
    return store.features(example, last, tapped)


def final_states(target: Target, client: Client, rows: Tensor) -> Tensor:
    """Final states [S, H] after the norm, from an engine's states [S, layers, H] on the target's device."""
    normed = client.servers[0].dialect.HIDDEN_STATES_NORMED
    return rows[:, -1].to(target.dtype) if normed else target.model.normed(rows[:, -1])


def check_states(store: OwnForward, client: Client, states: HiddenStatesSpec, examples: list[Example]) -> None:
    """Check that the servers serve the target and give its states, on the longest of `examples`. CheckpointError or
    EngineError if not."""
    client.compare(store.target)
    client.check_states(states)
    longest = sorted(examples, key=lambda e: -len(e.tokens))
    if store.target.whole:
        check_same(store, client, states, longest[0])
    else:
        check_plausible(store, client, states, longest[:PROBED_TEXTS])


def check_same(store: OwnForward, client: Client, states: HiddenStatesSpec, example: Example) -> None:
    """Check that every server gives the features of our own forward for one text. Each server is asked twice, since the
    second answer may come from a cache. CheckpointError if they differ."""
    (own,) = store.compute([example])
    count = len(client.servers)
    worst = 0.0
    for _ in range(2):
        asked = client.states([tokens_to_send(example)] * count, states)  # one per server: the least busy is asked
        for _, rows in asked:
            theirs = to_features(store, client, states, example, own_rows(example, rows))
            worst = max([worst, *differences(own, theirs, len(store.taps))])
            if worst > MAX_STATE_DIFFERENCE:
                raise _mismatch_error(store, client, states, f"they differ from its own states by {worst:.0%}")
    interrupts.check()
    log(f"the server's hidden states differ from the target's own by {worst:.2g} of their norm")


def check_plausible(store: OwnForward, client: Client, states: HiddenStatesSpec, examples: list[Example]) -> None:
    """Check the servers' states as far as is possible without the target's layers. CheckpointError if they are
    implausible.

    From each server's last states of the probe, the vocabulary head here must compute the log probabilities that the
    server itself reports, if it reports any. From the states of `examples`, the head must predict the next token often
    enough. Each server must give the same states twice, and all servers must agree.

    The check detects another vocabulary head or final norm, another layer as the last one, rows in the wrong place or
    from a cache, and weights that are unrelated to the texts. It does not detect from which layers the other states
    come. It also misses weights with the same head and similar text, such as a fine-tune's, and a norm that is applied
    twice and has uniform weights.
    """
    target, count = store.target, len(client.servers)
    furthest = right = total = 0.0
    for _, rows in client.states([client.probe] * count, states):
        if isinstance(rows, Tensor):  # a refusal is reported below, with the refused text
            own = _logprobs(target, client, rows, client.probe)
            furthest = max([furthest, *(distance(one.logprobs, own) for one in client.servers)])
    if furthest > MAX_LOGPROB_DISTANCE:
        what = (
            f"their log probabilities, by the target's vocabulary head, differ by {furthest:.2g} nats from the server's"
        )
        raise _mismatch_error(store, client, states, what)
    for example in examples:
        answers = []
        for _ in range(2):
            asked = client.states([tokens_to_send(example)] * count, states)  # one per server: the least busy is asked
            answers += [to_features(store, client, states, example, own_rows(example, rows)) for _, rows in asked]
        interrupts.check()
        for answer in answers[1:]:
            if max(differences(answers[0], answer, len(store.taps))) > MAX_STATE_DIFFERENCE:
                raise _mismatch_error(store, client, states, "they change when requested again")
        following = torch.tensor([*example.tokens[example.prompt_length + 1 :]])
        right += min((answer.best.cpu() == following).sum().item() for answer in answers)
        total += len(following)
    share = right / total
    if share < MIN_PREDICTED:
        raise _mismatch_error(
            store, client, states, f"they predict only {share:.0%} of the next tokens of the sequences"
        )
    agreement = f"; log probabilities within {furthest:.2g} nats" if any(one.logprobs for one in client.servers) else ""
    log(f"the server's hidden states predict {share:.0%} of the next tokens of {len(examples)} sequences{agreement}")


@torch.inference_mode()
def _logprobs(target: Target, client: Client, rows: Tensor, ids: list[int]) -> list[float]:
    """Log probabilities of all ids except the first: the vocabulary head here on an engine's states [S, layers, H]."""
    logits = target.model.logits(final_states(target, client, rows[:-1].to(target.device))).float()
    following = torch.tensor(ids[1:], device=target.device)
    return logits.log_softmax(-1).gather(1, following[:, None])[:, 0].tolist()


def _mismatch_error(store: OwnForward, client: Client, states: HiddenStatesSpec, what: str) -> CheckpointError:
    """The error for states that are not the target's; `what` is the evidence."""
    return CheckpointError(
        f"hidden states from {', '.join(one.url for one in client.servers)} do not match target {store.target.name}: "
        f"{what}; the weights differ, or the layers are not {list(states.ids)}",
        "; or ".join(f"start it with: {command}" for command in commands(client.recipe, states)),
    )


def differences(own: Features, theirs: Features, taps: int) -> list[float]:
    """Difference of the final states and of every tapped layer's states, relative to their length. It is the median
    over tokens, since some models' first tokens have states of another size than the rest."""
    pairs = [(own.teacher, theirs.teacher)]
    pairs += zip(own.taps.chunk(taps, -1), theirs.taps.chunk(taps, -1), strict=True) if taps else []
    shares = [((b.float() - a.float()).norm(dim=-1) / a.float().norm(dim=-1).clamp_min(1e-12)) for a, b in pairs]
    return [share.median().item() for share in shares]
