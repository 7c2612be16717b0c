"""The distribution of whole texts, written in several rounds by the real loop, against the target's by enumeration.

`test_law.py` integrates one round exactly. Here a text takes several rounds, which also detects a random number that
two rounds share. A target and a draft LM with three tokens write many texts of known probability, in host rounds and in
device rounds, and Pearson's χ² test compares the counts. Seeds are fixed: a test that passes once always passes.
"""

import itertools

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specctl import kernels
from specctl.decoding import prefill
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.sampling import ACCEPT, Draws, Sampling
from specctl.decoding.target import Target
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.lm.model import LM, AcceptanceHead
from specctl.kernels import reference
from tests.toys.decoding import decode

VOCABULARY = 3
NEW = 5  # tokens per text: the first is drawn in the prefill, the others in rounds
DEPTH = 3
PROMPT = [0]
TEXTS = 4_096
CONTROL = 12_288  # enough to detect the fault of `test_control_uniforms_keyed_by_position`
BATCH = 2_048
RULES = ["match", "token", "block"]
ROUNDS = pytest.mark.parametrize("device", [False, True], ids=["host", "device"])


def toy(seed):
    """A Llama of one layer with three tokens, none of which ends the text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def in_batches(monkeypatch):
    """On a CPU prompts and uniforms are processed text by text, but thousands of short texts need batches."""
    groups = prefill.groups
    monkeypatch.setattr(prefill, "groups", lambda lengths, slots, rows, starts: groups(lengths, slots, BATCH, starts))
    monkeypatch.setattr(kernels, "uniform", reference.uniform)  # bit-equal: tests/kernels/test_uniform.py


@pytest.fixture(scope="module")
def target():
    return Target("toy", toy(1), AutoTokenizer.from_pretrained(builtin_path()))


@pytest.fixture(scope="module")
def law(target):
    """The probability [3 ** NEW] of every text, computed with `transformers`."""
    return law_of(0.0)


def law_of(min_p):
    """The law of texts without the tokens below `min_p` times the likeliest one's probability."""
    texts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NEW)))
    whole = torch.cat((torch.tensor(PROMPT).expand(len(texts), -1), texts), 1)
    with torch.no_grad():
        rows = toy(1)(whole).logits.double().softmax(-1)[:, len(PROMPT) - 1 : -1]
    rows = torch.where(rows < min_p * rows.amax(-1, keepdim=True), 0.0, rows)
    logprobs = (rows / rows.sum(-1, keepdim=True)).log()
    return logprobs.gather(2, texts.unsqueeze(-1)).sum((1, 2)).exp()


def counts_of(target, rule, device=False, stop_below=0.0, texts=TEXTS, head=None, min_p=0.0):
    """The count of each text [3 ** NEW], and the mean number of accepted draft tokens per round.

    `device`: use device rounds instead of host rounds. `head`: an acceptance head of the draft LM.
    """
    shape = ChainShape(DEPTH, stop_below, rule != "match", "token" if rule == "match" else rule)
    drafter = LMDrafter(LM(toy(2), head), target, shape)
    counts = torch.zeros(VOCABULARY**NEW, dtype=torch.double)
    place = VOCABULARY ** torch.arange(NEW - 1, -1, -1)
    accepted = rounds = 0
    for start in range(0, texts, BATCH):
        seeds = [*range(start, min(start + BATCH, texts))]
        options = dict(
            sampling=Sampling(1.0, 0, 1.0, min_p=min_p),
            max_new_tokens=NEW,
            seeds=seeds,
            drafter=drafter,
            share_rows=False,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECCTL_GRAPHS", "eager" if device else "0")
            written = decode(target, [PROMPT] * len(seeds), **options)
        assert (written[-1].ahead > 0) == device
        counts += torch.bincount(
            (torch.tensor([text.output_ids for text in written]) * place).sum(1), minlength=len(counts)
        )
        accepted += sum(text.accepted for text in written)
        rounds += sum(text.target_passes for text in written)
    return counts, accepted / rounds


def chi_squared(counts, law):
    expected = law * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def bound(cells, normal_quantile=3.09):
    """The 99.9 % quantile of χ² with `cells` − 1 degrees of freedom (Wilson and Hilferty 1931)."""
    df = cells - 1
    spread = 2 / (9 * df)
    return df * (1 - spread + normal_quantile * spread**0.5) ** 3


@pytest.mark.parametrize(
    ("rule", "device", "stop_below"),
    [
        ("match", False, 0.0),
        ("token", False, 0.0),
        ("block", False, 0.0),
        ("token", False, 0.3),  # the host ends a chain at an improbable token
        ("block", False, 0.3),
        ("token", True, 0.0),
        ("block", True, 0.0),
    ],
)
def test_texts_of_several_rounds_have_the_targets_distribution(target, law, rule, device, stop_below):
    counts, accepted = counts_of(target, rule, device, stop_below)
    assert chi_squared(counts, law) < bound(len(law))
    assert accepted > 0.3


@pytest.mark.parametrize("rule", ["token", "block"])
def test_texts_with_min_p_have_the_targets_distribution_without_unlikely_tokens(target, law, rule):
    """Draft and target are filtered alike. In device rounds it would not hold, so the host runs them."""
    counts, accepted = counts_of(target, rule, min_p=0.6)
    expected = law_of(0.6)
    possible = expected > 0
    assert 0 < possible.sum() < len(law) and counts[~possible].sum() == 0 and accepted > 0.2
    assert chi_squared(counts[possible], expected[possible]) < bound(int(possible.sum()))
    assert chi_squared(counts[possible], law[possible]) > 2 * bound(int(possible.sum()))


@pytest.mark.parametrize("rule", RULES)
def test_drafts_ended_by_an_acceptance_head_keep_the_distribution(target, law, rule):
    """The head reads the text before a sampled token, not the token itself, so it introduces no bias."""
    torch.manual_seed(3)
    head = AcceptanceHead(8)
    head.out.weight.data *= 3
    counts, accepted = counts_of(target, rule, stop_below=0.4, head=head)
    assert chi_squared(counts, law) < bound(len(law))
    assert counts_of(target, rule, texts=BATCH)[1] > accepted > 0.3  # some drafts are shorter


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@ROUNDS
def test_many_texts_have_the_targets_distribution(target, law, rule, device):
    """With 200,000 texts."""
    assert chi_squared(counts_of(target, rule, device, texts=200_000)[0], law) < bound(len(law))


def test_control_uniforms_keyed_by_position(target, law, monkeypatch):
    """The block rule with one acceptance uniform per position, as in the token rule: later rounds reuse numbers that an
    earlier round has conditioned on, and the counts must show it."""

    def by_position(self, start, depths):
        return self.uniform(start + torch.arange(depths, device=start.device), ACCEPT)

    monkeypatch.setattr(Draws, "uniform_of_round", by_position)
    assert chi_squared(counts_of(target, "block", texts=CONTROL)[0], law) > 1.5 * bound(len(law))


@ROUNDS
def test_the_block_rule_accepts_more_than_the_token_rule(target, device):
    """Detects that the rule is not passed on: both would accept equally much."""
    block, token = (counts_of(target, rule, device, texts=BATCH)[1] for rule in ("block", "token"))
    assert block > token + 0.03
