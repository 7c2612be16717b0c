"""`specctl generate`: answer one prompt with and without a drafter."""

from dataclasses import dataclass
from typing import Any

from specctl.decoding import metrics
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded, Request, RoundResult
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target, load_target
from specctl.distillation.messages import prompt_id
from specctl.drafters import names, pool
from specctl.drafters.hybrid.weighed import unweighed
from specctl.errors import UsageError
from specctl.measuring import lossless
from specctl.measuring.contenders import VANILLA, WARMUP_TOKENS
from specctl.measuring.records import Record, write_outputs
from specctl.recipe import GenerateRecipe
from specctl.runs import Run


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. `accepted`: it was drafted and accepted; otherwise the target wrote it."""

    text: str
    accepted: bool


@dataclass(frozen=True)
class GenerateResult:
    """The result document of `generate`. Without a drafter only plain decoding is measured.

    `identical`: both texts are equal. If they are not, `agreement` tells a tie from a mismatch (None if sampling may
    give another text).
    """

    prompt: str
    text: str
    drafter: str | None
    tokens: int
    mat: float | None
    accept_rate: float | None
    tokens_per_s: float | None
    vanilla_tokens_per_s: float | None
    speedup: float | None
    unusable: str | None  # why the speed-up cannot be used (`metrics.why_unusable`)
    identical: bool | None
    agreement: lossless.Agreement | None
    prefill_s: float
    pieces: list[Piece]


class AcceptedTokens:
    """Listener that records, round by round, which tokens of a single sequence were drafted and accepted."""

    def __init__(self) -> None:
        self.flags = [False]  # the token of the prefill

    def __call__(self, state: DecodeState, result: RoundResult) -> None:
        row = state.rows[0]
        accepted = row.accepted - sum(self.flags)
        self.flags += [True] * accepted
        self.flags += [False] * (len(row.output) - len(self.flags))


def generate(
    recipe: GenerateRecipe, run: Run | None = None, *, target: Target | None = None, drafter: Drafter | None = None
) -> GenerateResult:
    """Answer `recipe.prompt` plainly, and also with the drafter (`drafter` or `recipe.drafter`), if there is one.

    Raises UsageError (no prompt), DataError (the prompt is longer than the context), CheckpointError (target or
    drafter).
    """
    if not recipe.prompt:
        raise UsageError("generate needs a prompt", hint='prompt="Write one SQL query …"')
    target = target or load_target(**recipe.target.loading)
    if run is not None:
        run.annotate(target=target.identity)
    messages = [{"role": "user", "content": recipe.prompt}]
    ids = target.render(messages, **recipe.target.chat_template_kwargs)
    if drafter is None and recipe.drafter:
        drafter = pool.load_drafter(recipe.drafter, target, recipe.drafting)
    if recipe.drafter:
        name = names.name_of(recipe.drafter)
    else:
        name = "" if drafter is None else type(unweighed(drafter)).__name__.lower()
    plain = _decode(target, recipe, ids, None)
    answers = {VANILLA: plain[0]}
    decoded, flags = plain
    if drafter is not None:
        decoded, flags = _decode(target, recipe, ids, drafter)
        answers[name] = decoded
    if run is not None and recipe.save_outputs:
        seed, heat = recipe.sampling.seed, recipe.sampling.temperature
        records = [Record(prompt_id(messages), "", who, seed, heat, answer) for who, answer in answers.items()]
        write_outputs(run.dir, records, target.tokenizer)
    return _result(recipe, target, decoded, flags, plain[0], name if drafter is not None else None)


def _decode(
    target: Target, recipe: GenerateRecipe, ids: list[int], drafter: Drafter | None
) -> tuple[Decoded, list[bool]]:
    """Decode after a short warm-up; return the answer, and for each of its tokens whether it was drafted."""
    sampling = recipe.sampling
    engine = Engine(target, Fixed.of(drafter), EngineOptions(exact=sampling.exact))
    for tokens in (min(sampling.max_new_tokens, WARMUP_TOKENS), sampling.max_new_tokens):
        engine.on_round = accepted = AcceptedTokens()
        (decoded,) = decode(engine, [Request(ids, Sampling.of(sampling), tokens, sampling.seed)])
    return decoded, accepted.flags


def _result(
    recipe: GenerateRecipe, target: Target, decoded: Decoded, flags: list[bool], plain: Decoded, drafter: str | None
) -> GenerateResult:
    agreement = None
    if drafter is not None and lossless.comparable(recipe.sampling, recipe.drafting):
        tolerance = lossless.tolerance(target, recipe.sampling)
        agreement = lossless.compare(target, plain.prompt_ids, plain.output_ids, decoded.output_ids, tolerance)
    mat = metrics.mat([decoded])
    speedup = metrics.speedup([decoded], [plain]) if drafter is not None else None
    return GenerateResult(
        prompt=recipe.prompt or "",
        text=target.tokenizer.decode(decoded.output_ids, skip_special_tokens=True),
        drafter=drafter,
        tokens=len(decoded.output_ids),
        mat=mat,
        accept_rate=metrics.accept_rate([decoded]),
        tokens_per_s=metrics.tokens_per_s([decoded]),
        vanilla_tokens_per_s=metrics.tokens_per_s([plain]),
        speedup=speedup,
        unusable=metrics.why_unusable(speedup, None, mat),
        identical=decoded.output_ids == plain.output_ids if drafter is not None else None,
        agreement=agreement,
        prefill_s=decoded.prefill_s,
        pieces=pieces(target.tokenizer, decoded.output_ids, flags),
    )


def pieces(tokenizer: Any, ids: list[int], accepted: list[bool]) -> list[Piece]:
    """Split the text of `ids` where `accepted` changes. Joined, the pieces are the decoded text.

    A character with bytes in several tokens belongs to the token that completes it.
    """
    cut: list[Piece] = []
    written = ""
    for end, flag in enumerate(accepted, 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        if end < len(ids) and (text.endswith("\ufffd") or not text.startswith(written)):
            continue
        new, written = text[len(written) :], text
        if cut and cut[-1].accepted == flag:
            cut[-1] = Piece(cut[-1].text + new, flag)
        elif new:
            cut.append(Piece(new, flag))
    return cut
