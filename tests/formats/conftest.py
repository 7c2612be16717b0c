"""Small random drafters of every family, and the logits that our own drafters compute."""

import functools
import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.commands import export as exporting
from specctl.commands import import_
from specctl.decoding.models.loading import load_model
from specctl.decoding.sampling import GREEDY
from specctl.drafters import checkpoint, pool
from specctl.drafters.dflash.head import BlockConfig, BlockHead
from specctl.drafters.eagle.head import EagleHead
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.feature.head import HeadConfig
from specctl.drafters.lm.model import LM
from specctl.drafters.peagle.head import PEagleConfig, PEagleHead
from specctl.recipe import DraftingRecipe, ExportRecipe, ImportRecipe
from tests.drafters.conftest import exact_products
from tests.toys.decoding import decode

__all__ = ["exact_products"]

STEPS = 4
DEFAULT, CUSTOM = (2, 5, 7), (1, 4, 9)  # of the ten layers of the built-in target


def shape(target, taps=DEFAULT, draft_vocab=None, kind=HeadConfig, **changes):
    return kind(
        **{
            **dict(hidden_size=target.hidden_size, intermediate_size=160, num_heads=8, num_kv_heads=2, head_dim=16),
            **dict(vocab_size=target.vocab_size, draft_vocab_size=draft_vocab or target.vocab_size, taps=taps),
            **dict(rms_norm_eps=3e-5, rope_theta=5000.0, max_position_embeddings=512),
            **changes,
        }
    )


def randomised(module):
    """Add noise to all parameters. Norms start at one and biases at zero, so an omitted one would go unnoticed."""
    torch.manual_seed(7)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else 0.05)
    return module.eval()


def modules(target, family, **options):
    torch.manual_seed(3)
    if family == "eagle3":
        config = shape(target, kind=Eagle3Config, **options)
        ids = torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values
        return randomised(Eagle3Head(config, ids))
    if family == "peagle":
        block = dict(num_layers=options.pop("layers", 2), depths=STEPS + 1, mask_token_id=9)
        config = shape(target, kind=functools.partial(PEagleConfig, **block), **options)
        ids = torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values
        return randomised(PEagleHead(config, ids))
    if family == "eagle":
        return randomised(EagleHead(shape(target, taps=(target.num_layers,), **options)))
    if family == "lm":
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        positions = dict(max_position_embeddings=target.context_length, eos_token_id=sorted(target.eos_ids))
        return randomised(LM(LlamaForCausalLM(LlamaConfig(vocab_size=target.vocab_size, **sizes, **positions))))
    if family == "dflash":
        draft, rank = options.pop("draft_vocab", None), options.pop("rank", 0)
        block = dict(num_layers=2, block_size=6, sample_from_anchor=rank > 0, mask_token_id=9, own_mask=True)
        config = BlockConfig(**asdict(shape(target, draft_vocab=draft)) | block | {"markov_rank": rank} | options)
        ids = torch.randperm(target.vocab_size)[:draft].sort().values if draft else None
        return randomised(BlockHead(config, ids))
    common = dict(hidden_size=target.hidden_size, vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size)
    common |= dict(draft_heads=STEPS, taps=(target.num_layers,))
    if family == "medusa":
        from specctl.drafters.depth.head import HeadsConfig
        from specctl.drafters.medusa.head import MedusaHeads

        return randomised(MedusaHeads(HeadsConfig(**common, num_layers=1)))
    from specctl.drafters.hydra.head import HydraConfig, HydraHeads

    text = target.config
    prefix = dict(intermediate_size=text.intermediate_size, num_heads=text.num_attention_heads)
    prefix |= dict(num_kv_heads=text.num_key_value_heads, head_dim=text.head_dim, rms_norm_eps=text.rms_norm_eps)
    prefix |= dict(rope_theta=text.rope_parameters["rope_theta"], max_position_embeddings=target.context_length)
    return randomised(HydraHeads(HydraConfig(**common, num_layers=3, **prefix)))


def export(drafter, to, place, change=None):
    """Write a foreign directory, and let `change(config, tensors)` modify it."""
    exporting.export(ExportRecipe(drafter=drafter, to=to, output_dir=place))
    (place / "export.json").unlink()
    if change is not None:
        config, tensors = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
        change(config, tensors)
        (place / "config.json").write_text(json.dumps(config))
        save_file(tensors, place / "model.safetensors")
    return place


def import_head(place, target, output, **options):
    """Run `specctl import`, without the probe unless `options` request it."""
    options = {"probe": {"enabled": False}, **options}
    return import_.import_head(ImportRecipe(head=place, output_dir=output, **options), target=target)


@pytest.fixture(scope="session")
def make(target, tmp_path_factory):
    """Return `build(family, **options)`, which gives the directory of a random drafter; each is made once."""
    made = {}

    def build(family, **options):
        if family not in pool.FAMILIES:
            pytest.skip(f"no family {family} here")
        key = (family, *sorted(options.items()))
        if key not in made:
            module = modules(target, family, **options)
            kind = pool.load_family(family)
            made[key] = checkpoint.save(
                tmp_path_factory.mktemp("drafters") / family,
                config=kind.checkpoint_config(module, target.identity),
                tensors=kind.stored_state(module.state_dict()),
                info={},
            )
        return made[key]

    return build


@pytest.fixture(scope="session")
def model():
    """The target in `transformers`."""
    return load_model("builtin", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="session")
def text(target, prompts):
    """Return (ids, number of committed tokens): a prompt and the target's continuation, longer than a window."""
    prompt = [*prompts[1], *prompts[0], *prompts[1]]
    (decoded,) = decode(target, [prompt], sampling=GREEDY, max_new_tokens=12, seeds=[0])
    return prompt + decoded.output_ids, len(prompt) + 3


@pytest.fixture(scope="session")
def ours(target, text):
    """Return `score(directory)`: logits [STEPS, V] of the draft steps after the committed text, by our own drafter."""

    @functools.cache
    def score(directory):
        drafter = pool.load_drafter(str(directory), target, DraftingRecipe())
        ids, committed = text
        found = []

        def ask(state, draft, verdict):
            if len(state.rows[0].ids) == len(ids) and not found:
                found.append(drafter.score(state, [range(committed, committed + STEPS)], STEPS)[0])

        options = {"taps": drafter.taps} if drafter.taps else {}
        prompt, fixed = ids[: committed - 3], dict(sampling=GREEDY, seeds=[0])
        decode(target, [prompt], max_new_tokens=len(ids) - len(prompt), on_round=ask, **fixed, **options)
        (score,) = found
        # the row at depth d (position committed − 1 + d) of the draft that began after `committed` tokens
        depths = range(STEPS) if score.logits.shape[0] > 1 else [0] * STEPS
        rows = torch.stack([score.logits[depth, place].float() for place, depth in enumerate(depths)])
        if score.ids is None:
            return rows
        return torch.full((STEPS, target.vocab_size), -torch.inf).index_copy(1, score.ids, rows)

    return score
