"""Trial of an unknown `transformers` model: one small draft tree, compared with the model's own plain forward.

No table covers every architecture, least of all models with custom code. A model that ignores masks or positions, or
keeps a cache outside of ours, would still write plausible text; this trial detects it.
"""

import torch
from torch import Tensor

from specctl.decoding.models.hf import HFModel
from specctl.decoding.plan import plan_rows
from specctl.decoding.records import topology

PARENTS = [-1, -1, 0, 1, 2]
LEAVES = [3, 4]
PROMPT, SHORTER = 9, 4
# Relative errors of logits, median over the nodes. Rounding differs with the shape of a batch, and a mixture may route
# a row to other experts. An ignored mask or position gives errors around 1.
TOLERANCE = {torch.float32: 1e-2}
COARSE = 0.1


@torch.inference_mode()
def trial(model: HFModel) -> str | None:
    """Run two prompts of different lengths, each with a draft tree, and compare the logits with plain forwards.

    Returns None if they agree, otherwise the fault as text. Takes six forwards over a few tokens.
    """
    try:
        ours, theirs = _by_tree(model), _by_branch(model)
    except Exception as error:  # the code of an unknown architecture may raise anything
        first = str(error).strip().splitlines()
        return (
            f"its code does not work with an external cache and external masks ({(first or [type(error).__name__])[0]})"
        )
    if not (torch.isfinite(ours).all() and torch.isfinite(theirs).all()):
        return f"its logits are not finite in {str(model.dtype).removeprefix('torch.')}"
    shift = theirs.mean(-1, keepdim=True)  # an offset common to all tokens means nothing, and would hide a difference
    off = ((ours - theirs).norm(dim=-1) / (theirs - shift).norm(dim=-1).clamp_min(1e-6)).median().item()
    if off > TOLERANCE.get(model.dtype, COARSE):
        return f"its logits for a draft tree differ from its forward pass over each branch (relative error {off:.2g})"
    return None


def _texts(model: HFModel) -> tuple[list[list[int]], list[int]]:
    vocabulary = model.embedding.shape[0]
    ids = [(37 * i + 11) % vocabulary for i in range(PROMPT + len(PARENTS))]
    return [ids[:PROMPT], ids[1 : 1 + SHORTER]], ids[PROMPT:]


def _by_tree(model: HFModel) -> Tensor:
    """Logits [2 · nodes, V] of the tree step."""
    prompts, draft = _texts(model)
    options = {"device": model.device, "dtype": model.dtype}
    tokens = torch.zeros(len(prompts), PROMPT, dtype=torch.long, device=model.device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=model.device)
    cache = model.new_cache(len(prompts), PROMPT + len(draft) + 1)
    model.forward(tokens, cache, plan_rows([0] * len(prompts), PROMPT, **options), ())
    depth, ancestors = topology(PARENTS)
    visible = torch.tensor([[bits >> i & 1 for i in range(len(draft))] for bits in ancestors], device=model.device)
    plan = plan_rows(
        [len(prompt) for prompt in prompts],
        len(draft),
        visible=visible.bool().expand(len(prompts), -1, -1),
        depth=torch.tensor([depth] * len(prompts), device=model.device) - 1,
        **options,
    )
    nodes = torch.tensor([draft] * len(prompts), device=model.device)
    hidden, _ = model.forward(nodes, cache, plan, ())
    return model.logits(hidden).flatten(0, 1).float()


def _by_branch(model: HFModel) -> Tensor:
    """Logits of the same nodes from plain forwards without a cache: one per prompt and branch."""
    prompts, draft = _texts(model)
    _, ancestors = topology(PARENTS)
    rows: dict[tuple[int, int], Tensor] = {}
    for number, prompt in enumerate(prompts):
        for leaf in LEAVES:
            branch = [node for node in range(len(draft)) if ancestors[leaf] >> node & 1]
            ids = torch.tensor([prompt + [draft[node] for node in branch]], device=model.device)
            logits = model.model(input_ids=ids, use_cache=False).logits[0, len(prompt) :]
            rows |= {(number, node): row for node, row in zip(branch, logits, strict=True)}
    return torch.stack([rows[key] for key in sorted(rows)]).to(model.device).float()
