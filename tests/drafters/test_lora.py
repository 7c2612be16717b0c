"""Adapters on a shared base draft like their merged weights."""

import peft
import pytest
import torch

from specctl.decoding.models.linear import Linear
from specctl.decoding.sampling import GREEDY
from specctl.drafters import checkpoint, lora, pool
from specctl.drafters.eagle.drafter import FAMILY as eagle
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.lora import Adapter, LowRank
from specctl.drafters.mtp.drafter import FAMILY as mtp
from specctl.errors import CheckpointError, RecipeError
from specctl.families import FAMILIES
from specctl.recipe import DrafterRecipe, DraftingRecipe, LoraRecipe, TrainRecipe
from tests.drafters.heads import eagle3_head
from tests.toys import mtp as mtp_layers
from tests.toys.decoding import decode

SETTINGS = {"rank": 4, "alpha": 8.0}


def random_adapter(head, generator, names=FAMILIES["eagle3"].lora_modules, rank=SETTINGS["rank"]):
    """Return random adapter tensors for `head`, large enough to change its drafts."""
    tensors = {}
    for name, module in head.named_modules():
        if name.rsplit(".", 1)[-1] in names:
            rows, columns = module.weight.shape
            tensors[name + lora.DOWN] = torch.randn(rank, columns, generator=generator) * columns**-0.5
            tensors[name + lora.UP] = torch.randn(rows, rank, generator=generator) * 0.1
    return tensors


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def head(request, target):
    torch.manual_seed(3)
    sizes = DrafterRecipe(vocab_size=256, num_layers=request.param)
    head = Eagle3Head(eagle3.architecture(sizes, target), torch.arange(256) * 7)
    head.initialise(target)
    return head


@pytest.fixture
def place(head, target, tmp_path):
    """Save a base and two adapters, and return their directory."""
    config = eagle3.checkpoint_config(head, target.identity)
    base = checkpoint.save(tmp_path / "base", config=config, tensors=head.state_dict(), info={})
    origin = {"path": "../base", "sha256": checkpoint.weights_digest(base)}
    for seed, name in enumerate(("a", "b")):
        tensors = random_adapter(head, torch.Generator().manual_seed(seed))
        checkpoint.save(
            tmp_path / name, config=config | {"lora": {**SETTINGS, "base": origin}}, tensors=tensors, info={}
        )
    return tmp_path


@pytest.mark.parametrize("present", [("q", "k", "v"), ("k",), ("q", "v"), ()])
def test_a_fused_product_applies_the_updates_of_its_parts(present):
    """An adapter may cover all, some or none of the projections that are fused."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": 12, "k": 4, "v": 4}
    weights = {name: torch.randn(rows, 10, generator=generator) for name, rows in sizes.items()}
    pairs = {
        n: (torch.randn(3, 10, generator=generator), torch.randn(sizes[n], 3, generator=generator)) for n in present
    }
    fused = Linear(torch.cat(list(weights.values())))
    adapted = Adapter(pairs).on(fused, list(sizes.items()), torch.device("cpu"))
    assert isinstance(adapted, LowRank) == bool(present)
    merged = Adapter(pairs).merge({f"{name}.weight": weight for name, weight in weights.items()})
    x = torch.randn(5, 10, generator=generator)
    torch.testing.assert_close(adapted(x), x @ torch.cat(list(merged.values())).T, atol=1e-5, rtol=1e-5)


def test_an_adapter_drafts_like_its_merged_weights(place, head, target):
    """All products are adapted: logits after `fc`, the layer and the vocabulary head agree."""
    adapted = pool.load_drafter(str(place / "a"), target, DraftingRecipe())
    whole = pool.merge_adapter(checkpoint.load(place / "a"))
    merged = eagle3.make_drafter(eagle3.restore(whole.config, whole.tensors), target, DraftingRecipe())
    taps, tokens = torch.randn(6, 3 * target.hidden_size), torch.arange(6)
    for ours, theirs in zip(run(adapted, taps, tokens), run(merged, taps, tokens), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    plain = pool.load_drafter(str(place / "base"), target, DraftingRecipe())
    assert not torch.allclose(run(adapted, taps, tokens)[-1], run(plain, taps, tokens)[-1], atol=1e-2)


def run(drafter, taps, tokens):
    residual, inputs = drafter.layer_input(tokens, drafter.feature(taps))
    qkv = drafter.qkv(inputs)
    entered = residual, qkv, qkv[:, : drafter.heads * drafter.dim]
    table = drafter._rope_for(len(taps)).rows(
        torch.arange(len(taps)), drafter.heads + drafter.kv_heads, drafter.kv_heads
    )
    hidden = drafter._run_layers(entered, table, lambda place, x, pairs, query: (x, query.flatten(1)))
    return qkv, hidden, drafter.logits(hidden)


@pytest.mark.parametrize("family", [eagle3, eagle, mtp])
def test_an_adapter_scores_a_text_like_its_merged_weights(target, prompts, family):
    """A ragged batch with an empty span, and updates of different ranks and projections."""
    head = {
        eagle3: lambda: eagle3_head(target, 0),
        eagle: lambda: eagle.build(TrainRecipe(), target, lambda size: range(size)),
        mtp: lambda: mtp_layers.head(target),
    }[family]()
    config, state_dict = family.checkpoint_config(head, target.identity), family.stored_state(head.state_dict())
    base = family.make_drafter(head, target, DraftingRecipe())
    pairs = []
    for seed, (rank, names) in enumerate([(4, FAMILIES[config["family"]].lora_modules), (3, ("o_proj", "up_proj"))]):
        tensors = random_adapter(head, torch.Generator().manual_seed(seed), names, rank)
        adapter = Adapter.of({**config, "lora": {"rank": rank, "alpha": 8.0}}, tensors)
        whole = family.restore(config, adapter.merge(state_dict))
        pairs.append((base.adapted(adapter), family.make_drafter(whole, target, DraftingRecipe())))
    found = []

    def ask(state, draft, verdict):
        spans = [range(len(row.ids) - size, len(row.ids)) for row, size in zip(state.rows, [4, 0, 9], strict=True)]
        for adapted, merged in pairs:
            for ours, theirs in zip(adapted.score(state, spans, 2), merged.score(state, spans, 2), strict=True):
                found.append(theirs.logits)
                if theirs.logits is not None:
                    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-3, rtol=1e-3)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=3, seeds=[0] * 3, taps=base.taps, on_round=ask)
    assert found[1] is None and (found[0] - found[3]).abs().max() > 0.01


def test_adapters_in_a_pool_share_their_base(place, target):
    bases = {}
    a, b, plain = (pool.load_drafter(str(place / name), target, DraftingRecipe(), bases) for name in ("a", "b", "base"))
    assert [*bases.values()] == [plain]
    for name in ("fc", "qkv", "o", "gate_up", "down", "head"):
        assert getattr(a, name).base is getattr(b, name).base
        assert getattr(a, name).down is not getattr(b, name).down
    assert a.token_input is b.token_input and a is not b
    assert a.qkv.base is plain.qkv


def test_a_base_moves_with_its_adapter_and_is_checked_by_hash(place, target):
    (place / "elsewhere").mkdir()
    for name in ("a", "base"):
        (place / name).rename(place / "elsewhere" / name)
    (place / "elsewhere/base").rename(place / "elsewhere/moved")
    (place / "elsewhere/damaged").mkdir()
    (place / "elsewhere/damaged/manifest.json").write_text("{")  # it used to end the search
    pool.load_drafter(str(place / "elsewhere/a"), target, DraftingRecipe())
    with pytest.raises(CheckpointError, match=r"adapter of \.\./base"):
        pool.load_drafter(str(place / "b"), target, DraftingRecipe())
    other = checkpoint.load(place / "elsewhere/moved")
    tensors = {name: tensor + 1 if name == "fc.weight" else tensor for name, tensor in other.tensors.items()}
    checkpoint.save(place / "base", config=other.config, tensors=tensors, info={})
    with pytest.raises(CheckpointError, match="different weights"):
        pool.load_drafter(str(place / "b"), target, DraftingRecipe())


@pytest.mark.parametrize("modules", [None, ["q_proj", "fc"]])
def test_peft_loads_an_adapter(place, head, target, modules):
    """Merging with PEFT gives the same weights as `merge_adapter`."""
    names = modules or FAMILIES["eagle3"].lora_modules
    tensors = random_adapter(head, torch.Generator().manual_seed(5), names)
    config = checkpoint.load(place / "a").config
    checkpoint.save(place / "c", config=config, tensors=tensors, info={})
    base = pool.restore_module(checkpoint.load(place / "base"))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, place / "c").merge_and_unload().state_dict()
    wanted = pool.merge_adapter(pool.read_checkpoint(place / "c")).tensors
    assert merged.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(merged[name], tensor)
        changed = name.endswith(tuple(f"{one}.weight" for one in names))
        assert torch.equal(tensor, before[name]) is not changed, name
    said = peft.PeftConfig.from_pretrained(place / "c")
    assert (said.r, said.lora_alpha, said.base_model_name_or_path) == (4, 8.0, "../base")


def test_unknown_projections_are_refused(head):
    with pytest.raises(RecipeError, match="unknown embed_tokens"):
        lora.inject(head, LoraRecipe(enabled=True, modules=["fc", "embed_tokens"]), FAMILIES["eagle3"].lora_modules)


@pytest.mark.parametrize("name", ["eagle", "hydra"])
def test_eagle_and_hydra_take_adapters(target, prompts, name):
    """The drafter applies every adaptable projection: it scores like the merged weights."""
    family = pool.load_family(name)
    torch.manual_seed(0)
    module = family.build(TrainRecipe(arch=name), target, lambda size: list(range(size)))
    generator = torch.Generator().manual_seed(1)
    config = {**family.checkpoint_config(module, target.identity), "lora": SETTINGS}
    adapter = Adapter.of(config, random_adapter(module, generator, FAMILIES[name].lora_modules))
    merged = family.restore(config, adapter.merge(family.stored_state(module.state_dict())))
    plain, whole = (family.make_drafter(part, target, DraftingRecipe()) for part in (module, merged))
    found = {}

    def ask(state, draft, verdict):
        span = [range(len(state.rows[0].ids) - 3, len(state.rows[0].ids))]
        for drafter in (plain, whole, adapted):
            found.setdefault(drafter, drafter.score(state, span, 2)[0].logits)

    adapted = plain.adapted(adapter)
    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=2, seeds=[0], taps=plain.taps, on_round=ask)
    torch.testing.assert_close(found[adapted], found[whole], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found[adapted], found[plain], atol=1e-2)
