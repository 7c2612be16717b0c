"""Drafter of family `lm`: a small language model with a separate cache drafts chains, without the target's features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from specctl import kernels
from specctl.decoding.cache import KVCache
from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.models.hf import HFModel
from specctl.decoding.models.lean import LeanModel, unsupported_reason
from specctl.decoding.models.model import Model
from specctl.decoding.models.supported import DENSE
from specctl.decoding.plan import Plan, plan_at, plan_rows
from specctl.decoding.protocols import DeviceDraft, Drafter
from specctl.decoding.records import PADDING, ChainRows, DraftTree, Score, empty_draft
from specctl.decoding.sampling import DRAFT
from specctl.decoding.state import DecodeState, lagging_sequences
from specctl.decoding.target import Target
from specctl.drafters.blueprint import build_or_raise, build_with_weights
from specctl.drafters.family import DrafterFamily
from specctl.drafters.lm.config import configuration, split_tensors, stored
from specctl.drafters.lm.model import LM, AcceptanceHead, architecture, base_of, cast
from specctl.drafters.lora import Adapter
from specctl.drafters.tree import ProposedTree, TreeBuilder, WorthLevel
from specctl.errors import CheckpointError
from specctl.recipe import DraftingRecipe, TrainRecipe

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Fused products of a `LeanModel` layer, and the projections that they fuse."""

RUNNERS_UP = 2  # added to each token of a chain when a hybrid weighs drafts by their rows


@dataclass(frozen=True)
class ChainShape:
    """Limits of a chain: at most `depth` tokens, ending with the first token of joint probability below `stop_below`.

    `sampled` draws the tokens if the target samples (accepted by the ratio rule `rule`); otherwise they are the most
    probable ones. Ending the chain at a token does not bias the sampling: whether a prefix is continued depends on the
    prefix alone.
    """

    depth: int
    stop_below: float
    sampled: bool
    rule: str = "token"


def shape_for(drafting: DraftingRecipe, device: torch.device) -> ChainShape:
    """Default shape for a device, overridden by the values set in the recipe.

    On a CPU a draft step for a small target costs at least a fifth of a verification, so only likely tokens are worth
    drafting. On a GPU reading the probabilities back to the host costs as much as the step, so chains never end early.
    """
    shape = ChainShape(7, 0.25, False) if device.type == "cpu" else ChainShape(5, 0.0, False)
    given = {key: value for key in ("depth", "stop_below") if (value := getattr(drafting, key)) is not None}
    return replace(shape, **given, sampled=drafting.proposal == "sampled", rule=drafting.rule)


@dataclass
class _Memory:
    """State of the drafter: its KV cache, and after the last committed token the logits and the confidence.

    Slots 0 .. length−1 hold the committed tokens, later slots the `drafted` ones. `logits` is [B, V], `confidence` [B].
    """

    cache: KVCache
    length: list[int]
    drafted: list[list[int]]
    logits: Tensor
    confidence: Tensor

    def select(self, index: Tensor) -> None:
        kept = index.tolist()
        self.cache.select(index)
        self.length = [self.length[b] for b in kept]
        self.drafted = [self.drafted[b] for b in kept]
        self.logits, self.confidence = self.logits[index], self.confidence[index]

    def renew(self, b: int) -> None:
        self.length[b], self.drafted[b], self.cache.skipped[b] = 0, [], range(0)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.logits.nbytes

    def known(self, b: int, ids: list[int]) -> int:
        """Number of tokens of `ids` that are cached: accepted draft tokens are included, the last token never is."""
        found = self.length[b]
        for token, drafted in zip(ids[found:-1], self.drafted[b], strict=False):
            if token != drafted:
                break
            found += 1
        return found


class LMDrafter(Drafter):
    """Runs an `LM` for drafting on the lean step, with a copy of its weights in the target's dtype."""

    def __init__(self, model: nn.Module, target: Target, shape: ChainShape):
        """`model`: an `LM`, which is not modified."""
        self.shape = shape
        assert isinstance(model.model, PreTrainedModel)
        own = cast(copy.deepcopy(model.model).requires_grad_(False), target.device, target.dtype).eval()
        lean = own.config.model_type in DENSE and not unsupported_reason(own.config)
        self.model: Model = LeanModel(own) if lean else HFModel(own)
        head = getattr(model, "confidence_head", None)
        self.confidence_head = None if head is None else copy.deepcopy(head).requires_grad_(False).to(target.device)
        self.vocab_size, self.intermediate_size = target.vocab_size, getattr(own.config, "intermediate_size", 0)

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Number of outputs of each projection in a fused product."""
        model = self.model
        assert isinstance(model, LeanModel)
        inner, kv = self.intermediate_size, model.kv_heads * model.head_dim
        size = (model.hidden_size,)
        return {"qkv": (model.heads * model.head_dim, kv, kv), "o": size, "gate_up": (inner, inner), "down": size}

    def adapted(self, adapter: Adapter) -> LMDrafter:
        """Return a copy of this drafter with low-rank updates; it shares all weights but has separate caches."""
        if not isinstance(self.model, LeanModel):
            raise CheckpointError("LoRA adapters run on the lean step only", "merge the adapter: train without --lora")
        twin, model = copy.copy(self), self.model.with_own_layers()
        twin.model = model
        for number, layer in enumerate(model.layers):
            for fused, names in FUSED.items():
                sizes = zip(names, self.outputs[fused], strict=True)
                parts = [(f"model.layers.{number}.{name}", size) for name, size in sizes]
                setattr(layer, fused, adapter.on(getattr(layer, fused), parts, model.device))
        return twin

    def invalidate(self, state: DecodeState) -> None:
        """Forget keys and values; the next `advance` recomputes them from the text."""
        state.memory.pop(self, None)

    def advance(self, state: DecodeState) -> None:
        """Read all committed tokens that are not cached yet, including the last one, in one forward."""
        memory = state.memory.get(self)
        if memory is None:
            memory = state.memory[self] = _Memory(
                self.model.new_cache(state.batch, state.capacity),
                [0] * state.batch,
                [[] for _ in state.rows],
                torch.zeros(state.batch, self.vocab_size, device=state.device),
                torch.ones(state.batch, device=state.device),
            )
        elif memory.cache.capacity < state.capacity:
            memory.cache = memory.cache.moved_to(self.model.new_cache(state.batch, state.capacity))
        texts = [row.ids for row in state.rows]
        ends = [len(ids) for ids in texts]
        read = partial(self._catch_up, memory, texts)
        starts = state.catch_up.skip(memory.cache, self._known(memory, state), ends, read)
        missing = [end - start for start, end in zip(starts, ends, strict=True)]
        lagging = lagging_sequences(missing, state.device)
        for b in lagging:
            read(b, range(starts[b], ends[b]))
        width = max((count for b, count in enumerate(missing) if b not in lagging), default=0)
        if width > 0:
            hidden, _ = self._read(state, width)
            last = torch.tensor([min(len(ids), width) - 1 for ids in texts], device=state.device)
            hidden = hidden[torch.arange(state.batch, device=state.device), last]
            memory.logits, memory.confidence = self.logits(hidden), self.confidence(hidden)
        memory.length = ends
        memory.drafted = [[] for _ in texts]

    def lag(self, state: DecodeState) -> list[int]:
        """Number of committed tokens per sequence that the next `advance` reads."""
        memory: _Memory | None = state.memory.get(self)
        known = [0] * state.batch if memory is None else self._known(memory, state)
        return [state.catch_up.count(start, len(row.ids)) for start, row in zip(known, state.rows, strict=True)]

    @staticmethod
    def _known(memory: _Memory, state: DecodeState) -> list[int]:
        """Number of committed tokens of every sequence that are cached."""
        assert all(n <= len(row.ids) for n, row in zip(memory.length, state.rows, strict=True)), "stale draft cache"
        return [memory.known(b, row.ids) for b, row in enumerate(state.rows)]

    def _catch_up(self, memory: _Memory, texts: list[list[int]], b: int, places: range) -> None:
        """Read some tokens of sequence b, and keep the logits that follow them."""
        cache = memory.cache.sequence(b)
        tokens = torch.tensor([texts[b][places.start : places.stop]], device=cache.store.device)
        plan = plan_rows([places.start], len(places), device=tokens.device, dtype=cache.store.dtype)
        hidden = self._forward(tokens, cache, plan)[:, -1]
        memory.logits[b], memory.confidence[b] = self.logits(hidden)[0], self.confidence(hidden)[0]

    def _forward(self, tokens: Tensor, cache: KVCache, plan: Plan) -> Tensor:
        """Hidden states [B, T, H] of tokens; skipped slots are masked."""
        return self.model.forward(tokens, cache, plan.without_slots(cache.skipped, cache.store.dtype), ())[0]

    def _ready(self, state: DecodeState) -> _Memory:
        self.advance(state)
        memory: _Memory = state.memory[self]
        assert memory.length == [len(row.ids) for row in state.rows], "stale draft cache"
        return memory

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Score a text: the logits before each position are the same for all depths, as the preceding text is.

        One forward over the last tokens of every sequence recomputes keys and values that are already cached.
        """
        memory = self._ready(state)
        width = max((len(row.ids) - span.start for row, span in zip(state.rows, spans, strict=True) if span), default=0)
        if width == 0:
            return [Score(span) for span in spans]
        children, sampled = (1,) * self.shape.depth, self._samples(state)
        ends = [len(row.ids) for row in state.rows]
        asked = [span.start - 1 if span else end for span, end in zip(spans, ends, strict=True)]
        hidden, base = self._read(state, max(width + 1, state.catch_up.slots_to_reread(memory.cache, asked, ends)))
        scores = []
        for b, (start, span) in enumerate(zip(base, spans, strict=True)):
            at = slice(span.start - 1 - start, span.stop - 1 - start) if span else slice(0, 0)
            scores.append(Score(span, self.logits(hidden[b, at]).unsqueeze(0), children=children, sampled=sampled))
        return scores

    def _read(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        """Hidden states [B, width, H] of every sequence's last `width` tokens, and the position of the first of each.

        Reading a few tokens again costs nothing, and no row needs a padding slot, which could lie past the end of the
        cache for a finished sequence. Short prompts are padded.
        """
        memory: _Memory = state.memory[self]
        texts = [row.ids for row in state.rows]
        base = [max(len(ids) - width, 0) for ids in texts]
        tokens = torch.tensor([ids[-width:] + [0] * (width - len(ids)) for ids in texts], device=state.device)
        plan = plan_rows(base, width, device=state.device, dtype=state.dtype)
        memory.cache.mark_written(base)
        return self._forward(tokens, memory.cache, plan), base

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft a chain from the last committed token, no longer than the sequence has room for."""
        memory = self._ready(state)
        depths = [min(self.shape.depth, budget, row.draft_room) for row in state.rows]
        if max(depths) <= 0:
            return empty_draft(state.batch, state.device)
        sampled = self._samples(state)
        chains: list[list[int]] = [[] for _ in state.rows]
        joint = [1.0] * state.batch
        rows: list[kernels.Rows] = []
        logits, confidence, asked = memory.logits, memory.confidence, []
        for step in range(max(depths)):
            asked.append(logits)
            if sampled:
                drawn, gains = self._sample(state, logits, step, rows)
            else:
                drawn, gains = self._best(logits)
            if self.confidence_head is not None and self.shape.stop_below > 0:
                gains = confidence.tolist()
            picked = drawn.tolist()
            growing = False
            for b, token in enumerate(picked):
                if step < depths[b] and joint[b] >= self.shape.stop_below:
                    chains[b].append(token)
                    # The unlikely token itself stays in the draft: dropping it because of its value would bias the
                    # distribution.
                    joint[b] *= gains[b]
                    growing |= step + 1 < depths[b] and joint[b] >= self.shape.stop_below
            if not growing:
                break
            logits, confidence = self._after(state, memory, step, picked)
        drawn_from = stacked(rows) if sampled else None
        return DraftTree.from_chains(chains, state.device, drawn_from, self.shape.rule, ChainRows(asked))

    def propose_candidates(self, state: DecodeState, budget: int, pays: WorthLevel) -> list[ProposedTree]:
        """Draft chains of at most `budget` tokens after the last committed token of every sequence, with runners-up."""
        memory = self._ready(state)
        depth = min(self.shape.depth, max(row.draft_room for row in state.rows), budget)
        growing = [TreeBuilder() for _ in state.rows]
        chain = [-1] * state.batch
        logits = memory.logits
        for step in range(depth):
            logprob, index = kernels.expand_topk(logits, RUNNERS_UP + 1)
            for b, (tree, gains, ids) in enumerate(zip(growing, logprob.tolist(), index.tolist(), strict=True)):
                tree.add(chain[b], gains, ids)
                chain[b] = len(tree.tokens) - len(ids)
            if step + 1 == depth or not pays([tree.joint[node] for tree, node in zip(growing, chain, strict=True)]):
                break
            logits, _ = self._after(state, memory, step, index[:, 0].tolist())
        return [tree.proposal(row.draft_room) for tree, row in zip(growing, state.rows, strict=True)]

    def _after(self, state: DecodeState, memory: _Memory, step: int, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Read the tokens [B] drafted at `step`. Returns the logits [B, V] and the confidence [B] that follow them."""
        plan = plan_rows([n + step for n in memory.length], 1, device=state.device, dtype=state.dtype)
        hidden = self._forward(torch.tensor(tokens, device=state.device).unsqueeze(1), memory.cache, plan)
        for drafted, token in zip(memory.drafted, tokens, strict=True):
            drafted.append(token)
        return self.logits(hidden[:, 0]), self.confidence(hidden[:, 0])

    def _samples(self, state: DecodeState) -> bool:
        return self.shape.sampled and not state.draws.greedy

    @property
    def fixed_shape(self) -> bool:
        """Whether all drafts have the same length and the model is a `LeanModel`."""
        return self.shape.stop_below <= 0 and isinstance(self.model, LeanModel)

    def on_device(self, state: DecodeState, budget: int) -> LMRounds | None:
        """Return the device-side rounds, or None if they cannot be used.

        Drafts that may end early are decided by the host, and other models have no lean step.
        """
        return LMRounds(self, state, budget) if self.fixed_shape and budget > 0 else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the target's vocabulary; models of one family pad their vocabularies to different sizes."""
        logits = self.model.logits(hidden)
        missing = self.vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[..., : self.vocab_size]
        return F.pad(logits, (0, missing), value=float("-inf"))

    def confidence(self, hidden: Tensor) -> Tensor:
        """Probability [B] that the target accepts the token after the states [B, H]; 1 without a confidence head."""
        if self.confidence_head is None:
            return hidden.new_ones(len(hidden), dtype=torch.float32)
        probability: Tensor = self.confidence_head(hidden.float()).sigmoid()
        return probability

    @property
    def _stops_by_probability(self) -> bool:
        """Whether the probabilities of drafted tokens end a draft; a confidence head takes their place."""
        return self.shape.stop_below > 0 and self.confidence_head is None

    def _best(self, logits: Tensor) -> tuple[Tensor, list[float]]:
        """Most probable tokens [B], and their probabilities (1 if they are not needed)."""
        if not self._stops_by_probability:
            return logits.float().argmax(-1), [1.0] * len(logits)
        logprob, token = kernels.expand_topk(logits, 1)
        return token[:, 0], logprob[:, 0].exp().tolist()

    def _sample(
        self, state: DecodeState, logits: Tensor, step: int, rows: list[kernels.Rows]
    ) -> tuple[Tensor, list[float]]:
        """Draw tokens [B] from the rows of `logits`, and append the rows to `rows`. Also returns their probabilities
        (1 if they are not needed).

        Every depth has a separate random stream. A position that is drafted again in a later round is at another depth.
        So no uniform number is used twice, even if a controller has learned from the first draft.
        """
        row = state.draws.rows(logits.unsqueeze(1))
        rows.append(row)
        positions = torch.tensor([[len(sequence.ids) + step] for sequence in state.rows])
        drawn = kernels.sample_rows(row, state.draws.uniform(positions, DRAFT + step).reshape(-1))
        if not self._stops_by_probability:
            return drawn, [1.0] * len(logits)
        score = row.logits.gather(1, drawn.unsqueeze(1))[:, 0] * row.inv_temp
        return drawn, (score - row.lse).exp().tolist()


class LMRounds(DeviceDraft):
    """Device-side rounds of an `LMDrafter`: slot i of its cache holds token i.

    `following` [B, V] holds the logits after the last committed token, in fp32, as a GPU gives them for bf16 models.
    """

    def __init__(self, drafter: LMDrafter, state: DecodeState, budget: int):
        self.drafter, self.depth = drafter, min(drafter.shape.depth, budget)
        self.reach = self.depth + 2
        self.following = torch.zeros(state.batch, drafter.vocab_size, device=state.device)
        self.carried = [self.following]

    def load(self, state: DecodeState) -> None:
        self.drafter.advance(state)
        memory = state.memory[self.drafter]
        self.following.copy_(memory.logits)
        self.cache, self.keys = memory.cache, memory.cache.captured_tensor

    def fits(self, state: DecodeState) -> bool:
        memory = state.memory.get(self.drafter)
        return memory is not None and memory.cache.captured_tensor is self.keys

    def store(self, state: DecodeState) -> None:
        memory = state.memory[self.drafter]
        memory.length, memory.logits = [len(row.ids) for row in state.rows], self.following

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        """Draft like `LMDrafter.propose`, with tensors of fixed shapes."""
        sampled = self.drafter.shape.sampled and not sequences.draws.greedy
        alone = torch.ones(sequences.batch, 1, 1, dtype=torch.bool, device=sequences.device)
        logits, rows = self.following, []
        chosen: list[Tensor] = []
        for step in range(self.depth):
            if step:
                plan = plan_at(sequences.length + step - 1, alone, 0, span=span, dtype=sequences.dtype, chain=True)
                hidden, _ = self.drafter.model.forward(chosen[-1], self.cache, plan, ())
                logits = self.drafter.logits(hidden[:, 0])
            if sampled:
                row = sequences.draws.rows(logits.unsqueeze(1))
                positions = (sequences.length + step).unsqueeze(1)
                uniforms = sequences.draws.uniform(positions, DRAFT + step).flatten()
                chosen.append(kernels.sample_rows(row, uniforms).unsqueeze(1))
                rows.append(row)
            else:
                chosen.append(kernels.argmax(logits).unsqueeze(1))
        place = torch.arange(self.depth, device=sequences.device)
        parents = torch.where(place < sequences.draft_room.unsqueeze(1), place - 1, PADDING)
        tokens = torch.cat(chosen, 1)
        return DraftTree(tokens, parents, stacked(rows) if sampled else None, rule=self.drafter.shape.rule)

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:
        """Read the committed tokens in as many rows as a round can commit; the last token is repeated as padding.

        Accepted tokens were already read when they were drafted. Reading them again avoids working out which ones.
        """
        place = torch.arange(sequences.widest, device=before.device)
        end = sequences.length - 1
        slots = torch.minimum(before.unsqueeze(1) + place, end.unsqueeze(1))
        causal = (place <= place.unsqueeze(1)).expand(sequences.batch, -1, -1)
        plan = plan_at(before, causal, place, span=span, dtype=sequences.dtype, chain=True)
        hidden, _ = self.drafter.model.forward(sequences.ids.gather(1, slots), self.cache, plan, ())
        last = (end - before).clamp(min=0).unsqueeze(1)  # a finished sequence has no new tokens
        self.following.copy_(self.drafter.logits(hidden[sequences.sequences, last][:, 0]))


def stacked(rows: list[kernels.Rows]) -> kernels.Rows:
    """Stack the rows of all depths, sequence-major: row b·n + i belongs to token i of sequence b."""
    return kernels.Rows(*(torch.stack(field, 1).flatten(0, 1) for field in zip(*rows, strict=True)))


class LMFamily(DrafterFamily):
    """Small language models."""

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> LM:
        """Build a preset with random weights, or load the causal LM that `drafter.base` names."""
        shape = recipe.drafter
        model = LlamaForCausalLM(architecture(shape, target)) if shape.base is None else base_of(shape, target)
        size: int = model.config.hidden_size
        return LM(model, AcceptanceHead(size).to(model.device) if shape.confidence else None)

    def stored_architecture(self, module: LM) -> dict[str, Any]:
        return stored(module.model.config)

    def stored_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}

    def restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> LM:
        shape = configuration(config.get("architecture"))
        own, head = split_tensors(tensors)
        model = build_with_weights(lambda: AutoModelForCausalLM.from_config(shape), own)
        build_or_raise(lambda: _tried(model))
        return LM(model, build_with_weights(lambda: AcceptanceHead(shape.hidden_size), head) if head else None)

    def make_drafter(self, module: LM, target: Target, drafting: DraftingRecipe) -> LMDrafter:
        return LMDrafter(module, target, shape_for(drafting, target.device))


@torch.no_grad()
def _tried(model: PreTrainedModel) -> None:
    """Read two tokens, so that sizes that fit the weights but not each other fail now, not while decoding."""
    model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)


FAMILY = LMFamily("lm")
