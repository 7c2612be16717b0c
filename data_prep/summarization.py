"""Summarization: paper abstracts to put in one sentence, and conversations to put in a clinical note."""
# ruff: noqa: E501  (one sentence a line)

from __future__ import annotations

from random import Random

from . import dialogues
from .domain import Domain, PublicSet
from .grammar import Grammar, articles, lines, pick, rules, tidy
from .lexicon import NAMES

# Shared by the parts of one abstract: {m} what is proposed, {p} the problem, {k} the kind of model it is about.
_RULES = rules("""
    model: deep neural networks | generative adversarial networks | variational autoencoders | recurrent neural networks | graph neural networks
        | convolutional networks | language models | reinforcement learning agents | Gaussian processes | autoregressive models | transformers
        | sequence-to-sequence models | Bayesian neural networks | normalizing flows | capsule networks | decision trees | word embeddings
    problem: image classification | machine translation | few-shot learning | continual learning | adversarial robustness | domain adaptation
        | representation learning | exploration | model compression | question answering | semantic segmentation | anomaly detection
        | imitation learning | text generation | speech recognition | program synthesis | object detection | transfer learning | video prediction
        | out-of-distribution detection | meta-learning | neural architecture search | point cloud processing | molecule generation | planning
        | uncertainty estimation | multi-agent coordination | dialogue generation | privacy-preserving training | graph classification
    idea: attention | regularization | distillation | pruning | quantization | pre-training | memory | contrastive | curriculum | hierarchical
        | variational | spectral | adaptive | sparse | low-rank | equivariant | self-supervised | differentiable | Bayesian | recurrent | causal
        | multi-scale | gradient-based | model-based | latent-variable | information-theoretic | energy-based | disentangled | mutual information
    thing: method | approach | framework | algorithm | architecture | objective | estimator | layer | training procedure | model | loss | module
    method: {idea} {thing} | {idea} {idea} {thing} | {idea} {thing} for {problem} | {idea} {thing}
    name: {letter}{letter}{letter}-Net | {word}{Word} | {letter}{letter}{letter} | {Word}GAN | Meta{Word} | {Word}Net | Deep{Word} | {letter}-{letter}{letter}E
    word: flow | path | grad | sparse | graph | mask | patch | core | prune | mix | tree | code | link | fast | neuro | auto
    letter: A | B | C | D | E | F | G | H | K | L | M | N | P | R | S | T | V
    property: the number of samples | the depth of the network | catastrophic forgetting | vanishing gradients | mode collapse | the curse of dimensionality
        | a large number of parameters | high variance | label noise | distribution shift | overfitting | sparse rewards | the choice of hyperparameters
        | expensive annotation | limited memory | spurious correlations | slow convergence | the non-convexity of the loss
    data: CIFAR-10 | CIFAR-100 | ImageNet | MNIST | Atari games | Penn Treebank | WikiText-2 | SQuAD | Omniglot | miniImageNet | CelebA | MuJoCo tasks
        | WMT'14 English-German | QM9 | Cora and Citeseer | COCO | LibriSpeech | synthetic data | real-world datasets | several benchmarks
    gain: accuracy | sample efficiency | robustness | generalization | training speed | memory use | perplexity | likelihood | interpretability
""")
_CONTEXT = lines("""
    {K} have <achieved|shown|demonstrated> <remarkable|impressive|great> <success|results> <in|on> <a wide range of|many> <tasks|applications>, but <they suffer from|their use is limited by|it is hard to deal with> {property}.
    {P} is a <fundamental|challenging|long-standing|central> problem in machine learning<, with applications in {problem}|>.
    <Recent|Existing|Most current> <approaches|methods|solutions> to {p} <rely on|require|are based on> {k}, <which are sensitive to|but they ignore|and do not scale because of> {property}.
    Despite the <success|popularity> of {k}, <it is not well understood why|little is known about how> they <generalize|work|fail> <in practice|in the presence of {property}|>.
    <Learning|Training> {k} for {p} <remains|is> difficult <due to|because of> {property}.
    <Humans|Animals> are able to <learn from a few examples|solve new tasks quickly>, while {k} need <large amounts of|millions of> <data|labels|interactions>.
    In many <applications|real-world settings>, such as {problem}, <labels|observations|rewards> are <scarce|noisy|expensive>.
    {K} are <typically|usually> trained by <maximizing the likelihood|minimizing a loss|backpropagation>, which <leads to|ignores|does not account for> {property}.
""")
_PROPOSAL = lines("""
    <In this paper|In this work|Here>, we <propose|introduce|present> {name}, a <novel|new|simple|general> {m} <for|that improves> {p}.
    We <propose|introduce|present|develop> a <novel|new|simple|principled> {m} <for {p}|to address this <issue|problem>|that <avoids|reduces> {property}>.
    <To this end|To overcome this|Motivated by this>, we <propose|develop> a {m} <based on|inspired by|that combines> {idea} and {idea} <ideas|techniques|learning>.
    We <study|analyze|investigate> {p} <through the lens of|from the perspective of> {idea} <learning|methods|inference>, and <show|prove> that {k} <can be improved|fail> <under|because of> {property}.
    <This paper|This work> <shows|demonstrates> how {k} can be used for {p} without {property}.
    We <revisit|reconsider> the <use|role> of {idea} <learning|methods|terms> in {k} and <derive|obtain> a {m}.
""")
_DETAIL = lines("""
    <Our|The proposed> {thing} <learns|uses|maintains|exploits> a {idea} <representation|structure|prior|policy> that <is shared across tasks|can be trained end-to-end|adapts to the input>.
    <Specifically|In particular|More precisely>, we <replace|augment|combine> the <standard|usual> <objective|layers|encoder> with a {idea} <term|component|network>.
    <The key idea is to|We> <decompose|approximate|constrain> the <gradient|posterior|policy|weights> <with|by> a {idea} {thing}.
    We <prove|show theoretically> that <our|the> {thing} <converges|is unbiased|is optimal> <under mild assumptions|in the linear case|at a rate of O(1/n)|>.
    <Unlike|In contrast to> <previous|prior|existing> <work|methods>, <our|the> approach <does not require|is not limited by|scales in spite of> {property}.
    This <allows us to|makes it possible to> <train|fine-tune|analyze> {k} <with fewer labels|on a single GPU|without supervision|in an online fashion>.
    <Moreover|Furthermore|In addition>, we <show|find> that {idea} <training|pre-training|regularization> is <crucial|not necessary|complementary>.
""")
_OUTCOME = lines("""
    <Experiments|Extensive experiments|Empirical results> on {data} <and {data}|> <show|demonstrate> that <our method|{name}> <outperforms|improves on|matches> <the state of the art|strong baselines|previous methods> <in terms of {gain}|by {1-15}.{0-9}%|>.
    We <evaluate|validate|test> <our approach|it> on {data} and <observe|report> <significant|consistent|large> <improvements|gains> in {gain}.
    On {data}, <our model|it> <achieves|reaches> {60-99}.{0-9}% accuracy with <{2-10} times fewer parameters|only {1-20}% of the labels|much less computation>.
    We <also|further> <apply|extend> <our|the> {thing} to {problem}<, where it improves {gain}|>.
    <Finally|Lastly>, we <discuss|analyze> the <limitations|learned representations|effect of {property}> <and release our code|>.
    <The code is available online.|Our results suggest that {idea} methods are a promising direction for {p}.>
""")
_GRAMMAR = Grammar(NAMES, _RULES)
_TALK = Grammar(NAMES, dialogues.RULES)


def _abstract(random: Random) -> str:
    bound = {
        name: _GRAMMAR.draw(random, rule)
        for name, rule in {"m": "method", "p": "problem", "k": "model", "name": "name"}.items()
    }
    plan = ((_CONTEXT, 1, 4), (_PROPOSAL, 1, 2), (_DETAIL, 1, 4), (_OUTCOME, 2, 4))
    chosen = [random.sample(templates, random.randint(least, most)) for templates, least, most in plan]
    body = " ".join(_GRAMMAR.expand(random, template, bound) for part in chosen for template in part)
    return f"Summarize this paper abstract in one sentence.\n\n{articles(tidy(body))}"


def _dialogue(random: Random) -> str:
    section = random.choices(tuple(dialogues.SECTIONS), tuple(dialogues.SECTIONS.values()))[0]
    pool = dialogues.exchanges(section)
    chosen = random.sample(pool, min(len(pool), 1 + int(random.random() ** 2 * 11)))
    if random.random() < 0.4:
        chosen.insert(0, pick(random, dialogues.OPENINGS))
    if random.random() < 0.4:
        chosen.append(pick(random, dialogues.CLOSINGS))
    turns: list[str] = []
    for exchange in chosen:
        doctor, patient = articles(tidy(_TALK.expand(random, exchange))).split(" / ")
        turns += (f"Doctor: {doctor}", f"Patient: {patient[:1].upper()}{patient[1:]}")
    return f'Write the "{section}" section of a clinical note from this conversation.\n\n' + "\n".join(turns)


def _sample(random: Random) -> str:
    return _abstract(random) if random.random() < 0.45 else _dialogue(random)


DOMAIN = Domain(
    name="summarization",
    description="paper abstracts in one sentence, conversations as sections of a clinical note",
    public=PublicSet(
        id="allenai/scitldr",
        config=None,
        split={"train": "train", "test": "test"},
        columns={"abstract": "source"},
        template="Summarize this paper abstract in one sentence.\n\n{abstract}",
        licence="Apache-2.0",
        citation="Cachola et al., TLDR: Extreme Summarization of Scientific Documents (2020)",
        revision="refs/convert/parquet",
        data_dir="Abstract",
    ),
    sample=_sample,
)
