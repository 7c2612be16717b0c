"""One small draft tree through a model of `transformers`, against its own plain forward.

No table knows every architecture, least of all those that bring their own code. A model that ignores masks or
positions, or keeps a cache that we do not see, would still write plausible text; here it shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.decoding.cache import plan_rows
from specctl.decoding.draft import topology
from specctl.decoding.hf import HFModel

PARENTS = [-1, -1, 0, 1, 2]
LEAVES = [3, 4]
PROMPT, SHORTER = 9, 4
# Relative errors of hidden states, in the middle of the nodes: rounding differs with the shape of a batch, a mixture
# may send one row to other experts. A wrong mask or position gives errors around 1.
TOLERANCE = {torch.float32: 1e-2}
COARSE = 0.1


@torch.inference_mode()
def trial(model: HFModel) -> str | None:
    """None when two prompts of different lengths, each with a draft tree behind it, give the states of plain forwards.

    Otherwise what went wrong, in words. Takes six forwards of a few tokens.
    """
    try:
        found = _by_tree(model)
        wanted = _by_branch(model)
    except Exception as error:  # whatever the code of an unknown architecture raises
        first = str(error).strip().splitlines()
        return f"its code does not work with a cache and masks from outside ({(first or [type(error).__name__])[0]})"
    if not all(torch.isfinite(part).all() for part in (*found, *wanted)):
        return f"its states or logits are not finite in {str(model.dtype).removeprefix('torch.')}"
    for ours, theirs, what in zip(found, wanted, ("hidden states", "logits"), strict=True):
        error = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-6)).median().item()
        if error > TOLERANCE.get(model.dtype, COARSE):
            return f"{what} of a draft tree are not those of its own forward (relative error {error:.2g})"
    return None


def _texts(model: HFModel) -> tuple[list[list[int]], list[int]]:
    vocabulary = model.embedding.shape[0]
    ids = [(37 * i + 11) % vocabulary for i in range(PROMPT + len(PARENTS))]
    return [ids[:PROMPT], ids[1 : 1 + SHORTER]], ids[PROMPT:]


def _by_tree(model: HFModel) -> tuple[Tensor, Tensor]:
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
    hidden, _ = model.forward(nodes, cache, plan, (0, model.num_layers))
    return hidden.flatten(0, 1).float(), model.logits(hidden).flatten(0, 1).float()


def _by_branch(model: HFModel) -> tuple[Tensor, Tensor]:
    """Each branch behind each prompt through the model as its authors run it, without a cache."""
    prompts, draft = _texts(model)
    _, ancestors = topology(PARENTS)
    hidden, logits = {}, {}
    for row, prompt in enumerate(prompts):
        for leaf in LEAVES:
            branch = [node for node in range(len(draft)) if ancestors[leaf] >> node & 1]
            ids = torch.tensor([prompt + [draft[node] for node in branch]], device=model.device)
            output = model.model(input_ids=ids, use_cache=False)
            states = model.body(input_ids=ids, use_cache=False).last_hidden_state
            for at, node in enumerate(branch, len(prompt)):
                hidden[row, node] = states[0, at].to(model.device).float()
                logits[row, node] = output.logits[0, at].to(model.device).float()
    order = sorted(hidden)
    return torch.stack([hidden[key] for key in order]), torch.stack([logits[key] for key in order])
