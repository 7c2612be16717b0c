"""`specctl eval-server`: speed of a drafter in the engine that serves it, by load."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specctl import progress, regular_files
from specctl.decoding.target_text import TargetText, load_target_text
from specctl.distillation.prompts import read_domains
from specctl.distillation.rejections import Rejections
from specctl.engines.client import Client
from specctl.engines.records import DraftCounters, GenerationRequest, GenerationResult
from specctl.errors import DataError
from specctl.measuring.contenders import Case, prepare
from specctl.measuring.conversations import next_turn
from specctl.measuring.served_costs import DrafterSpeeds, predict_speeds, sweep_of
from specctl.measuring.served_rows import Reply, ServedLength, ServedRow, by_length, figures
from specctl.recipe import EvalServerRecipe
from specctl.runs import PRIVATE, Run

REQUESTS = "requests.jsonl"
WARMUP = 2  # requests per server before timing starts


@dataclass(frozen=True)
class ServedResult:
    """The result document of `eval-server`.

    `lengths` is empty if all prompts fall into one bucket of lengths. `worth` is empty without a baseline, and if the
    server does not draft or does not report its drafts.
    """

    servers: list[ServedRow]
    rejected: int  # prompts
    lengths: list[ServedLength]
    worth: list[DrafterSpeeds]
    later_turns: int  # follow-up turns of conversations, sent to the server at each concurrency


@dataclass(frozen=True)
class ServerPass:
    """One run of all conversations of a domain through a server.

    Attributes:
        replies: by (number of the conversation, turn), without the baseline's answers.
        seconds: time during which requests were in flight.
        drafting: the engine's counters for these replies, or None if it does not report them.
        failures: requests that failed and were sent again.
        cached_prompt: share of the prompts' tokens that came from the engine's prefix cache, or None if it does not
            tell.
    """

    replies: dict[tuple[int, int], Reply]
    seconds: float
    drafting: DraftCounters | None
    failures: int
    cached_prompt: float | None

    def paired_with(self, base: ServerPass | None) -> list[Reply]:
        """The replies, each paired with the baseline's answer to the same turn if there is one."""
        if base is None:
            return list(self.replies.values())
        others = {place: reply.answer for place, reply in base.replies.items()}
        return [replace(reply, baseline=others.get(place)) for place, reply in self.replies.items()]


def evaluate_server(recipe: EvalServerRecipe, run: Run) -> ServedResult:
    """Send the prompts of a recipe to its server and its baseline server, at every concurrency.

    Raises DataError (no usable prompts), EngineError (a server that cannot be reached or keeps failing),
    CheckpointError (a server of another target), Interrupted.
    """
    recipe.check_server()
    target = load_target_text(**recipe.target.text)
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    with Client(recipe.server) as client, Client(recipe.baseline_server) as other:  # either may have no URLs
        clients = {"server": client} | ({"baseline": other} if recipe.baseline_server.urls else {})
        for one in clients.values():
            one.check(target)
        data = recipe.data.model_copy(update={"limit": recipe.limit})
        prompts = read_domains(data, rejections, split=recipe.split, suite=True)
        cases = prepare(recipe, target, prompts, rejections)
        run.annotate(target=target.identity)
        rows: list[ServedRow] = []
        everything: dict[tuple[str, int], list[Reply]] = {}
        with regular_files.create_file(run.dir / REQUESTS, "x", encoding="utf-8", permissions=PRIVATE) as file:
            for domain in dict.fromkeys(case.prompt.domain for case in cases):
                mine = [case for case in cases if case.prompt.domain == domain]
                for number, concurrency in enumerate(recipe.concurrency):
                    order = list(clients) if number % 2 == 0 else list(clients)[::-1]
                    passes = {
                        name: run_conversations(clients[name], recipe, target, mine, concurrency) for name in order
                    }
                    for name in clients:
                        base = passes.get("baseline") if name == "server" else None
                        replies = passes[name].paired_with(base)
                        measured = figures(replies, base is not None, passes[name].drafting)
                        rows.append(row(name, clients[name], domain, concurrency, measured, passes[name]))
                        everything.setdefault((name, concurrency), []).extend(replies)
                        for reply in replies:
                            kept = {"server": name, "concurrency": concurrency, "domain": domain}
                            kept |= {"id": reply.conversation, "turn": reply.turn, "prompt_ids": reply.prompt_ids}
                            file.write(json.dumps(kept | asdict(reply.answer)) + "\n")
                    file.flush()
    lengths = [
        length
        for (name, concurrency), replies in everything.items()
        for length in by_length(replies, name, concurrency, name == "server" and len(clients) > 1)
    ]
    several = len({length.up_to for length in lengths}) > 1
    later = sum(reply.turn > 0 for reply in everything["server", recipe.concurrency[0]])
    return ServedResult(rows, rejections.count, lengths if several else [], predict_worth(rows, recipe.mats), later)


def predict_worth(rows: Sequence[ServedRow], mats: Sequence[float]) -> list[DrafterSpeeds]:
    """Predict the speed of drafters with these mats at every load, without mats beyond the measured draft length."""
    try:
        sweep = sweep_of([asdict(row) for row in rows])
    except DataError:  # nothing to compare with, or nothing drafted
        return []
    reached = [mat for mat in mats if mat <= sweep.drafted + 1]
    return [predict_speeds(load, reached) for load in sweep.loads]


def run_conversations(
    client: Client, recipe: EvalServerRecipe, target: TargetText, cases: Sequence[Case], concurrency: int
) -> ServerPass:
    """Run every conversation once, with `concurrency` requests in flight, after a few requests for warm-up.

    A turn follows the server's own answer to the turn before. It is sent when all answers to that turn have arrived.

    Raises Interrupted, EngineError, DataError (a prompt that the server refuses).
    """
    warm = [replace(ask, max_new_tokens=min(8, ask.max_new_tokens)) for ask in requests_of(recipe, cases[:WARMUP])]
    _ = list(client.answers(warm, limit=concurrency, timed=True))
    failures, before, cache = client.failures, client.drafting(), client.prefix_cache()
    replies: dict[tuple[int, int], Reply] = {}
    open_ones: dict[int, Case] = dict(enumerate(cases))
    seconds, turn = 0.0, 0
    total = sum(1 + len(case.prompt.later_turns) for case in cases)
    with progress.Progress(f"{client.servers[0].url} × {concurrency}", total=total, unit="requests") as bar:
        while open_ones:
            places = list(open_ones)
            started = time.perf_counter()
            for number, answer in client.answers(
                requests_of(recipe, list(open_ones.values())), limit=concurrency, timed=True
            ):
                case = open_ones[places[number]]
                if not isinstance(answer, GenerationResult):
                    raise DataError(
                        f"{client.servers[0].url} refuses {case.prompt.where}: {answer.reason}",
                        "leave the prompt out, or lower sampling.max_new_tokens",
                    )
                conversation = cases[places[number]].prompt.id
                replies[places[number], turn] = Reply(conversation, turn, case.ids, answer)
                bar.update(1)
            seconds += time.perf_counter() - started
            progress.interrupts.check()
            following = {
                place: next_turn(recipe, target, case, replies[place, turn].answer.output_ids)
                for place, case in open_ones.items()
            }
            open_ones = {place: case for place, case in following.items() if case is not None}
            turn += 1
    own = [reply.answer.drafting for reply in replies.values() if reply.answer.drafting is not None]
    after = client.drafting()
    drafting = None if after is None else after.since(before or DraftCounters())
    if len(own) == len(replies) and (drafting is None or any(one.accepted_at for one in own)):
        drafting = DraftCounters.total(own)  # without the requests of others
    asked, hit = (now - then for now, then in zip(client.prefix_cache(), cache, strict=True))
    cached = [reply.answer.cached_tokens for reply in replies.values()]
    told = [count for count in cached if count is not None]
    if len(told) == len(cached):
        asked, hit = sum(len(reply.prompt_ids) for reply in replies.values()), sum(told)
    share = hit / asked if asked > 0 else None
    return ServerPass(dict(sorted(replies.items())), seconds, drafting, client.failures - failures, share)


def requests_of(recipe: EvalServerRecipe, cases: Sequence[Case]) -> list[GenerationRequest]:
    """Requests for prompts, with the recipe's sampling and its only seed."""
    sampling, seed = recipe.sampling, recipe.seeds[0]
    return [
        GenerationRequest(
            case.ids, case.max_new_tokens, sampling.temperature, sampling.top_k, sampling.top_p, case.seed(seed)
        )
        for case in cases
    ]


def row(
    name: str, client: Client, domain: str, concurrency: int, measured: dict[str, Any], done: ServerPass
) -> ServedRow:
    return ServedRow(
        **measured,
        server=name,
        engine=" ".join((client.servers[0].facts.engine, client.servers[0].facts.version)),
        domain=domain,
        concurrency=concurrency,
        seconds=done.seconds,
        tokens_per_s=measured["tokens"] / done.seconds,
        failures=done.failures,
        cached_prompt=done.cached_prompt,
    )
