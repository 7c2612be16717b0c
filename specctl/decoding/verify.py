"""Verification of a draft: one target forward over it, then a lossless acceptance rule. First tokens of prompts.

Match rule (deterministic drafts, trees): a node draws its next token y ~ p(·|node) from the random stream of that
absolute position. The walk from the root follows the child that equals y. Each committed token is therefore exactly the
token that plain decoding would have drawn with the same seed. Ratio rule (sampled chains): Leviathan et al. 2023,
Algorithm 1; Chen et al. 2023, Algorithm 2; or for the chain as a block, Sun et al. 2025, Algorithm 2.

The row budget limits the nodes of a draft (`budget_for`): each node is a row of the target's step.
"""

from typing import Any

import torch
from torch import Tensor

from specctl import kernels, threads
from specctl.decoding.plan import Plan, plan_rows
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.protocols import Proposer
from specctl.decoding.records import PADDING, DraftTree, Sequence, Verdict, topology
from specctl.decoding.sampling import ACCEPT, TARGET, Draws
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.errors import CheckpointError, DataError
from specctl.recipe.sections import MOST_NODES

MAX_NODES = MOST_NODES + 1  # with the root
# Rows of a step, shared by the sequences of a batch: up to this number, a step costs little more than one row. The CPU
# value was measured on the built-in target with 8 sequences. On an H100, a step of an 8B model for 8 sequences takes
# 1.08 times as long with 64 rows as with 8, 1.17 times with 128 and 1.42 times with 256 (1,024 tokens each, bf16). Idle
# rows are computed like the others, so they use up the budget, too.
SHARED_ROWS = {"cpu": 24, "cuda": 128}


def verify(target: Target, state: DecodeState, draft: DraftTree) -> Verdict:
    """Run the target once over the last committed tokens and their drafts, and decide which tokens to commit."""
    parents = draft.parents.tolist()  # the only copy of the parents to the host
    plan, depth = _plan(state, draft, parents)
    roots = torch.tensor([[row.ids[-1]] for row in state.rows], device=state.device)
    tokens = torch.cat((roots, draft.tokens), 1) if draft.size else roots
    rows = tokens.shape[1]
    if state.exact_rows:
        tokens = torch.nn.functional.pad(tokens, (0, state.exact_rows - rows))
    logits, hidden, tapped = target.step(tokens, state.cache, plan, state.taps)
    if state.exact_rows:
        logits, hidden = logits[:, :rows], hidden[:, :rows]
    edited, failed = edit_logits(state.draws, logits, state.rows, parents, draft.tokens)
    path, accepted, bonus = judge(state.draws, draft, edited, plan.positions[:, :rows] + 1)
    paths, committed = _collect(draft, path, accepted, bonus)
    failed |= nonfinite_rows(target, last_rows(logits, paths))
    depths = [max(d, default=0) for d in depth]
    stops = []
    for nodes, inner in zip(paths, parents, strict=True):
        last = nodes[-1] if nodes else -1
        stops.append("rejected" if last in inner else "leaf")
    return Verdict(paths, committed, stops, depths, logits, hidden, tapped, draft.chain, failed)


def first_tokens(
    target: Target, state: DecodeState, slots: list[int], share: bool, prefix_cache: PrefixCache | None
) -> Tensor:
    """Run the prompts in `slots` and commit the first token of each. A sequence is failed if its logits are not finite,
    or if its constraint cannot be enforced. Returns the logits [n, V] at the ends of the prompts.

    `share`: the prompts share the pages of common prefixes. `prefix_cache`: cached texts of earlier calls.
    """
    texts = [state.rows[b] for b in slots]
    prompts, cached = [text.ids for text in texts], [0] * len(texts)
    with threads.step_threads(target.row_flops * sum(map(len, prompts))):
        if share:
            (logits, cached), tapped = target.prefill_shared(prompts, state.cache, slots), None
        elif prefix_cache is None:
            logits, _, tapped = target.prefill(prompts, state.cache, state.taps, slots)
        else:
            logits, tapped, cached = prefix_cache.prefill(target, prompts, state.cache, state.taps, slots)
    for text, count in zip(texts, cached, strict=True):
        text.cached = count
    positions = torch.tensor([[len(prompt)] for prompt in prompts], device=logits.device)
    nothing = positions[:, :0]
    draws = state.draws.select(slots)
    edited, failed = edit_logits(draws, logits.unsqueeze(1), texts, [[] for _ in texts], nothing)
    _, _, first = draws.follow(edited, positions, nothing, nothing)
    failed |= nonfinite_rows(target, logits)
    state.begin(slots, first.tolist(), tapped)
    for place, error in failed.items():
        row = texts[place]
        del row.ids[row.prompt_length :]  # drop the token: the logits that it was drawn from are wrong
        row.fail(error)
    return logits


def edit_logits(
    draws: Draws, logits: Tensor, texts: list[Sequence], parents: list[list[int]], tokens: Tensor
) -> tuple[Tensor, dict[int, Exception]]:
    """Apply the requests' penalties, biases and constraints to the logits [B, 1 + n, V] of texts and drafts.
    `parents` and `tokens` [B, n] are the drafts'. Returns the logits to draw from, and the errors by sequence."""
    if not any(text.request.edits_logits for text in texts):
        return logits, {}
    penalised = draws.penalise(logits, [text.ids for text in texts], parents, tokens)
    return constrain(adjust(penalised, texts, parents, tokens), texts, parents, tokens)


def adjust(logits: Tensor, texts: list[Sequence], parents: list[list[int]], tokens: Tensor) -> Tensor:
    """Logits [B, 1 + n, V] with the texts' adjustments. `parents` and `tokens` [B, n] are the drafts'."""
    adjusted = logits
    for b, text in enumerate(texts):
        adjustment = text.request.adjustment
        if adjustment is None:
            continue
        added = adjustment.added(text.answer, parents[b], tokens[b].tolist(), logits.shape[-1])
        adjusted = logits.clone() if adjusted is logits else adjusted
        adjusted[b] += added.to(logits)
    return adjusted


def constrain(
    logits: Tensor, texts: list[Sequence], parents: list[list[int]], tokens: Tensor
) -> tuple[Tensor, dict[int, Exception]]:
    """Logits [B, 1 + n, V] with −inf at the tokens that the texts' constraints forbid, and the errors by sequence.
    `parents` and `tokens` [B, n] are the drafts'."""
    asked = {b: text.request.constraint for b, text in enumerate(texts) if text.stop is None}
    failed: dict[int, Exception] = {}
    masked = logits
    for b, constraint in asked.items():
        if constraint is None:
            continue
        try:
            allowed = constraint.allowed(texts[b].ids, parents[b], tokens[b].tolist())
        except DataError as error:
            failed[b] = error
            continue
        masked = logits.clone() if masked is logits else masked
        masked[b].masked_fill_(~allowed.to(logits.device), -torch.inf)
    return masked, failed


def nonfinite_rows(target: Target, logits: Tensor) -> dict[int, Exception]:
    """Find the sequences with NaN or infinite logits in their row of `logits` [B, V], from which a token was drawn.
    Returns a CheckpointError for each."""
    return {b: not_finite(target) for b, fine in enumerate(kernels.finite_rows(logits).tolist()) if not fine}


def not_finite(target: Target) -> CheckpointError:
    return CheckpointError(
        f"the logits of target {target.name} are not finite in {str(target.dtype).removeprefix('torch.')}",
        "if fp16 overflows, use --dtype bf16 or fp32; otherwise its weights are damaged",
    )


def last_rows(logits: Tensor, paths: list[list[int]]) -> Tensor:
    """Rows [B, V] of logits [B, 1+n, V] at the end of the accepted paths: the last accepted node, or the root."""
    rows = [path[-1] + 1 if path else 0 for path in paths]
    if len(set(rows)) == 1:
        # A view. Copies of a large vocabulary's rows use several threads, and waking these costs.
        return logits[:, rows[0]]
    return logits[torch.arange(len(rows), device=logits.device), torch.tensor(rows, device=logits.device)]


def _plan(state: DecodeState, draft: DraftTree, parents: list[list[int]]) -> tuple[Plan, list[list[int]]]:
    """Plan of the step (positions and mask of root and nodes), and the depth of every node. `parents` are the
    draft's."""
    rows = draft.size + 1
    padded = max(rows, state.exact_rows)
    if state.exact_rows and rows > state.exact_rows:
        raise ValueError(f"exact mode has {state.exact_rows} rows per step, but the draft needs {rows}")
    span = state.capacity if state.exact_rows else None
    options: dict[str, Any] = dict(device=state.device, dtype=state.dtype, span=span)
    if draft.chain:
        depth = [[i + 1 for i, parent in enumerate(row) if parent != PADDING] for row in parents]
        return plan_rows(state.cached, padded, **options), depth
    trees = [topology(row) for row in parents]
    depth = [tree[0] for tree in trees]
    masks = torch.tensor([[1, *(bits << 1 | 1 for bits in tree[1])] for tree in trees])  # bit 0 = the root
    visible = (masks.unsqueeze(-1) >> torch.arange(padded)) & 1 > 0
    if padded > rows:
        visible = torch.cat((visible, torch.eye(padded, dtype=torch.bool)[rows:].expand(len(trees), -1, -1)), 1)
    steps = torch.tensor([[0, *d, *([0] * (padded - rows))] for d in depth], device=state.device)
    return plan_rows(state.cached, padded, visible=visible.to(state.device), depth=steps, **options), depth


def judge(draws: Draws, draft: DraftTree, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the acceptance rule for `draft`. `logits` [B, 1+n, V] are the target's, `positions` [B, 1+n] are the
    positions of the tokens they predict. Returns the path [B, n] of accepted nodes, the accepted length [B] and the
    bonus token [B]. All tensors stay on the device."""
    if draft.rows is not None:
        return _ratio_rule(draws, draft, logits, positions)
    return draws.follow(logits, positions, draft.tokens, draft.parents)


def _ratio_rule(draws: Draws, draft: DraftTree, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Acceptance rule for sampled chains (see `judge`).

    The token rule reads one acceptance uniform per position up to the first rejection. The next round starts after that
    position, so uniforms keyed by position are read once. The block rule reads the uniforms of the whole draft.
    """
    assert draft.rows is not None
    batch, size = draft.tokens.shape
    count = (draft.parents != PADDING).sum(1)
    if draft.rule == "block":
        u_accept = draws.uniform_of_round(positions[:, :1], size)
    else:
        u_accept = draws.uniform(positions[:, :size], ACCEPT)
    accepted, bonus = kernels.accept_chain(
        draws.rows(logits),
        draft.rows,
        draft.tokens,
        count,
        u_accept,
        draws.uniform(positions, TARGET),
        draft.rule,
    )
    return torch.arange(size, device=accepted.device).expand(batch, -1), accepted, bonus


def _collect(
    draft: DraftTree, path: Tensor, accepted: Tensor, bonus: Tensor
) -> tuple[list[list[int]], list[list[int]]]:
    """Accepted nodes and committed tokens of every sequence, in one copy to the host."""
    if not draft.size:
        return [[] for _ in draft.tokens], bonus.unsqueeze(1).tolist()
    paths, committed = [], []
    for row in torch.cat((accepted.unsqueeze(1), bonus.unsqueeze(1), draft.tokens, path), 1).tolist():
        count, token, tokens, nodes = row[0], row[1], row[2 : 2 + draft.size], row[2 + draft.size :]
        paths.append(nodes[:count])
        committed.append([tokens[node] for node in nodes[:count]] + [token])
    return paths, committed


def budget_for(share: bool, state: DecodeState, proposer: Proposer) -> int:
    """Draft nodes per sequence for this proposer. A proposer with `weighs_rows` limits the rows of a batch itself, so
    it gets the full budget."""
    return node_budget(state, share and not proposer.weighs_rows)


def node_budget(state: DecodeState, share: bool) -> int:
    """Draft nodes per sequence that a step has room for; `share`: the sequences of a batch share `SHARED_ROWS`."""
    if state.exact_rows:
        return state.exact_rows - 1
    if share and state.batch > 1:
        return nodes_within(SHARED_ROWS["cpu" if state.device.type == "cpu" else "cuda"], state.batch)
    return MAX_NODES - 1


def nodes_within(rows: int, batch: int) -> int:
    """Draft nodes per sequence so that a step of the whole batch has `rows` rows, roots included; at least one."""
    return min(max(rows // batch, 2), MAX_NODES) - 1
