"""Estimate the memory, disk space and time of `train-drafter` from the recipe and the target's configuration alone.

The estimate measures nothing and reads no weights: target and drafter are built on torch's meta device and counted. The
formulas describe this code base (fp32 master weights, autocast, no gradient accumulation). Two guesses are reported
with the result: the share of a device's peak that training reaches, and the length of texts that do not exist yet.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import nn

from specctl.decoding.models import lean
from specctl.decoding.models.loading import load_config
from specctl.decoding.models.supported import engine_only_reason, value_of_all_layers
from specctl.decoding.target import Target
from specctl.drafters.family import load_family
from specctl.drafters.feature.head import DraftHead, HeadConfig
from specctl.recipe import TrainRecipe
from specctl.training.balancing import Batch, balanced_rows, batches, rebalance, useful_share
from specctl.training.example import Example
from specctl.training.feature_files import ON_DISK, fp8_share
from specctl.training.features import CHUNK_TOKENS, HEAD_ROWS, PASS_TOKENS
from specctl.training.machine import DEVICES, GB, Machine, machine_for
from specctl.training.optimizers import is_embedding_like
from specctl.training.pieces import Cut
from specctl.training.schedule import Schedule, batch_tokens, sampled_softmax
from specctl.training.step_cost import (
    PROMPT_COST,
    matrix_parameters,
    passes,
    prompt_parameters,
    reads_features,
    step_work,
)
from specctl.training.target_outline import Outline

HEADROOM = 0.9  # usable share of a GPU's memory: CUDA context, collective buffers and fragmentation take the rest
STEP_SECONDS = 0.05  # least time of a step on GPUs: kernel launches, gradient exchange, host work
SPREAD = 0.4  # response lengths lie within the mean ± this share of the mean
SAMPLE = 2048  # number of texts that represent all texts
PROCESS_BYTES = 0.46 * GB  # Python with torch, transformers and DeepSpeed, before anything is loaded (measured)
JSON_BYTES = 12  # per token in a distilled record: its id as a number, and the text


@dataclass(frozen=True)
class Texts:
    """Data of an estimate: number of responses, mean tokens per response and per prompt, and whether they were counted
    or are assumed."""

    responses: int
    response_tokens: float
    prompt_tokens: float
    counted: bool

    @property
    def tokens(self) -> float:
        """Response tokens in total."""
        return self.responses * self.response_tokens

    @classmethod
    def of(cls, examples: list[Example], scale: float, counted: bool) -> Self:
        """Number and mean lengths of `examples`. Each example stands for `scale` texts."""
        count = len(examples)
        responses = sum(example.response_length for example in examples) / count
        return cls(round(scale * count), responses, sum(e.prompt_length for e in examples) / count, counted)

    @property
    def length(self) -> float:
        """Tokens of text, prompt included, per response token."""
        return 1 + self.prompt_tokens / self.response_tokens


@dataclass(frozen=True)
class Estimate:
    """Result of an estimate. Sizes are in GB (10⁹ bytes).

    `memory_gb` is the peak of the fullest GPU, divided by use. If that does not fit, `advice` names the recipe keys
    that help, with the key for the largest use first. `loaded_parameters` counts the target's parameters that training
    loads: the whole target, or only the parameters outside its layers.
    """

    gpu: str
    gpus: int
    processes: int
    utilisation: float
    target_parameters: int
    loaded_parameters: int
    drafter_parameters: int
    responses: int
    response_tokens: int
    texts_counted: bool
    steps: int
    useful_share: float
    flops: float
    hours: float
    memory_gb: dict[str, float]
    memory_limit_gb: float
    fits: bool
    advice: list[str]
    disk_gb: dict[str, float]

    @property
    def lines(self) -> list[str]:
        """The estimate in words, one line per topic."""
        per = "process" if self.gpu == "cpu" else "GPU"
        length = f"{self.response_tokens / self.responses:.0f} tokens{'' if self.texts_counted else ' (assumed)'}"
        fit = "fits" if self.fits else "does NOT fit; to reduce it: " + "; ".join(self.advice)
        ends = (
            f"{_count(self.loaded_parameters)} parameters of the target are loaded: embedding, final norm "
            "and vocabulary head, without its layers (features.whole_target=true loads them)"
        )
        return [
            f"{_count(self.target_parameters)} parameters in the target, {_count(self.drafter_parameters)} "
            f"in the drafter; {self.responses:,} responses of {length}",
            *([ends] if self.loaded_parameters < self.target_parameters else []),
            f"{self.steps:,} steps, {self.flops:.2g} FLOPs, {duration(self.hours)} "
            f"on {self.gpus} × {self.gpu} at {self.utilisation:.0%} of peak (an assumption)"
            f"{_waiting(self.useful_share, self.processes)}; "
            "distillation and acceptance checks not included",
            f"{sum(self.memory_gb.values()):.3g} of {self.memory_limit_gb:.3g} GB memory per {per} "
            f"({_sizes(self.memory_gb)}): {fit}",
            f"{sum(self.disk_gb.values()):.3g} GB on disk ({_sizes(self.disk_gb)})",
        ]


def estimate(recipe: TrainRecipe, config: Any, machine: Machine, texts: Texts) -> Estimate:
    """Estimate the cost of a recipe for a drafter family with weights; `config` is the target's, from `load_config`."""
    outline = Outline.of(config, machine.target_dtype(recipe.target.dtype, config))
    planned = PlannedTraining(recipe, outline, machine, texts, loads_layers(recipe, outline, machine))
    epoch, useful = planned.epoch()
    by_epoch = machine.processes > 1 or recipe.piece_length is not None
    tokens = sum(example.response_length for batch in epoch for share in batch for example in share)
    batch = tokens / len(epoch) if by_epoch else planned.batch_tokens
    steps = Schedule.of(recipe, planned.target, max(1, round(planned.texts.tokens / batch))).steps
    flops = planned.flops(steps, batch)
    seconds = max(flops / useful / machine.flops, steps * STEP_SECONDS if machine.gpu != "cpu" else 0)
    memory, disk = planned.memory(*planned.largest_share(epoch, batch)), planned.disk()
    room = HEADROOM * machine.memory_gb * GB - sum(memory.values())
    return Estimate(
        gpu=machine.gpu,
        gpus=machine.gpus,
        processes=machine.processes,
        utilisation=DEVICES[machine.gpu].utilisation,
        target_parameters=outline.parameters,
        loaded_parameters=planned.loaded,
        drafter_parameters=planned.parameters,
        responses=texts.responses,
        response_tokens=round(texts.tokens),
        texts_counted=texts.counted,
        steps=steps,
        useful_share=useful,
        flops=flops,
        hours=min(seconds / 3600, (recipe.max_minutes or float("inf")) / 60),
        memory_gb={name: size / GB for name, size in memory.items()},
        memory_limit_gb=machine.memory_gb,
        fits=room >= 0,
        advice=[] if room >= 0 else advice(memory, room, recipe, machine, planned.batch_tokens),
        disk_gb={name: size / GB for name, size in disk.items() if size},
    )


def loads_layers(recipe: TrainRecipe, outline: Outline, machine: Machine) -> bool:
    """Whether training loads the whole target. If the recipe leaves that open, it does if the target fits in memory
    together with a training on texts of `max_length` tokens, half of them prompt."""
    chosen = recipe.features.whole_target
    if chosen is not None or not recipe.trains_without_layers:
        return chosen is not False
    if outline.only_engines:
        return False
    half = recipe.max_length / 2
    planned = PlannedTraining(recipe, outline, machine, Texts(1, half, half, counted=False))
    tokens = batch_tokens(recipe, planned.target) / machine.processes
    if recipe.piece_length is not None:
        tokens = min(tokens, recipe.piece_length)
    memory = planned.memory(tokens, tokens * planned.texts.length)
    return sum(memory.values()) <= HEADROOM * machine.memory_gb * GB


def loads_layers_here(recipe: TrainRecipe, where: str) -> bool:
    """Whether training on this machine loads the whole target (`loads_layers`). If the recipe leaves that open, it does
    on a GPU that the table does not know, and under tensor parallelism, unless only an engine can run the target.

    `where`: name of the target, or the directory with its configuration, which is read without asking the hub.
    """
    chosen, machine = recipe.features.whole_target, machine_for(recipe)
    if chosen is not None or not recipe.trains_without_layers:
        return chosen is not False
    config = load_config(**recipe.target.described | {"name": where})
    if engine_only_reason(config) is not None:
        return False
    if recipe.target.tensor_parallel > 1 or machine is None:
        return True
    return loads_layers(recipe, Outline.of(config, machine.target_dtype(recipe.target.dtype, config)), machine)


class PlannedTraining:
    """A training run that has not begun, with the resources it would need.

    Attributes:
        target: the outline, on the type of device that the target would run on.
        whole: sample of the texts, cut at the longest length; each stands for `scale` texts.
        examples: the same sample in pieces, if the recipe cuts long texts.
        texts: the data in the form of these examples.
        features: bytes of the target features of all texts, in any mode; 0 if the drafter reads none.
        kept: bytes of the features that exist at a time.
        mode: features.mode with `auto` decided: `memory` if the features are within the budget, else
            `cached` with features.dir, or `online`.
        loaded: number of the target's parameters that are loaded.
    """

    def __init__(
        self, recipe: TrainRecipe, outline: Outline, machine: Machine, texts: Texts, loads_layers: bool = True
    ):
        self.recipe, self.outline, self.machine = recipe, outline, machine
        self.loads_layers = loads_layers
        self.loaded = outline.parameters if loads_layers else outline.non_layer_parameters
        self.drafter = outline.drafter(recipe)
        self.parameters = sum(p.numel() for p in self.drafter.parameters())
        self.whole = sample(texts, min(recipe.max_length, outline.context_length))
        self.scale = texts.responses / max(1, min(texts.responses, SAMPLE))
        load_family(recipe.arch).set_training_options(self.drafter, recipe)
        cut = Cut.of(recipe, self.drafter)
        self.examples = self.whole if cut is None else cut(self.whole)
        self.texts = texts = Texts.of(self.examples, self.scale, texts.counted)
        device = torch.device("cpu" if machine.gpu == "cpu" else "cuda")
        self.target = cast(Target, replace(outline, device=device))
        self.batch_tokens = batch_tokens(recipe, self.target, texts.tokens)
        if isinstance(self.drafter, DraftHead):
            self.drafter.sampled_softmax = sampled_softmax(recipe, self.target)
        self.depth = passes(self.drafter, recipe, self.target)
        self.features = texts.tokens * feature_bytes(self.drafter, outline, texts)
        self.mode: str = recipe.features.mode
        if self.mode == "auto":
            budget = recipe.features.budget_gb * 2**30 * machine.processes
            self.mode = "memory" if self.features <= budget else "cached" if recipe.features.dir else "online"
        ahead = min(1.0, recipe.features.ahead / max(1, texts.responses))
        self.kept = self.features * {"online": 0.0, "stream": ahead}.get(self.mode, 1.0)

    def epoch(self) -> tuple[list[Batch], float]:
        """Batches of an epoch on sample texts, and the share of the processes' time that is not spent waiting."""
        runs_target = self.features and self.mode == "online"
        work = step_work(self.drafter, self.recipe, self.target, 2.0 * self.outline.active if runs_target else 0.0)
        dealt = balanced_rows(self.examples, self.machine.processes, work)
        epoch = batches(dealt, self.batch_tokens, self.recipe.piece_length, seed=0, epoch=0)
        return epoch, useful_share(
            epoch if self.mode == "memory" else [rebalance(batch, work) for batch in epoch], work
        )

    def largest_share(self, epoch: list[Batch], batch: float) -> tuple[float, float]:
        """Most response tokens, and most tokens, of a process in a step; a step has `batch` response tokens."""
        if self.recipe.piece_length is None:
            tokens = max(self.batch_tokens, batch) / self.machine.processes
            return tokens, tokens * self.texts.length
        shares = [share for shares in epoch for share in shares]
        tokens = max(sum(example.response_length for example in share) for share in shares)
        return tokens, max(sum(len(example.tokens) for example in share) for share in shares)

    def flops(self, steps: int, batch: float) -> float:
        """FLOPs of `steps` steps with `batch` response tokens each, plus the target's forward passes that run here."""
        epochs = steps * batch / self.texts.tokens
        found = steps * batch * drafter_flops(self.drafter, self.depth, self.texts)
        if reads_features(self.drafter):
            found += epochs * self.scale * sum(head_attention(self.drafter, self.depth, one) for one in self.examples)
        if self.features and not self.recipe.features.is_served and self.loads_layers:
            # If features are not kept, a piece also needs the target's forward over the text before it.
            texts = [one.stop for one in (self.examples if self.mode == "online" else self.whole)]
            passes = epochs if self.mode == "online" else 1.0
            found += passes * self.scale * sum(forward_flops(self.outline, length) for length in texts)
        return found

    def memory(self, tokens: float, slots: float) -> dict[str, float]:
        """Peak bytes by use of a process that takes `tokens` response tokens per step and `slots` tokens in all, on its
        GPU if it has one. Features that are kept in memory are in host memory, so they count only on a CPU. An
        acceptance check counts as far as it needs more than a step, because the step's activations are free then."""
        recipe, outline, machine = self.recipe, self.outline, self.machine
        compute = machine.dtype(recipe.precision)
        found = {
            "target": self.target_bytes() / (machine.shards if self.loads_layers else 1),
            "drafter": state_bytes(self.drafter, recipe.optimizer_type, recipe.zero_stage, machine.processes),
            "activations": activation_bytes(self.drafter, tokens, self.depth, self.texts, compute),
        }
        if reads_features(self.drafter):
            found["activations"] += prompt_bytes(self.drafter, outline) * (slots - tokens)
        if compute.itemsize < 4:
            found["autocast"] = self.parameters * compute.itemsize  # a copy of the weights in lower precision
        if self.features:
            in_memory = self.mode in ("memory", "stream") and machine.gpu == "cpu"
            kept = self.kept / machine.processes if in_memory else 0
            batches = 1 if self.mode == "online" or machine.gpu == "cpu" else 2  # a GPU also holds the next batch
            states = outline.hidden_size * outline.dtype.itemsize
            found["features"] = batches * states * (len(cast(DraftHead, self.drafter).taps) * slots + tokens) + kept
            if self.loads_layers:
                found["target's forward"] = forward_bytes(outline, machine, max(one.stop for one in self.whole))
        if machine.gpu == "cpu":
            found["process"] = PROCESS_BYTES
            if self.loads_layers:  # a check holds the weights, the stored drafter and the drafter that it runs
                check = self.parameters * (4 + 4 + outline.dtype.itemsize)
                found["acceptance check"] = max(0.0, check - found["activations"] - found.get("autocast", 0))
        return found

    def target_bytes(self) -> int:
        """Bytes of the target's parameters that are loaded. A GGUF file stays quantized on a CPU."""
        outline, name = self.outline, self.recipe.target.name
        if self.loads_layers and self.machine.gpu == "cpu":
            stored = lean.stored_weights(name, outline.config, torch.device("cpu"), outline.dtype)
            if stored is not None:
                return sum(weight.nbytes for weight in stored.values())
        return self.loaded * outline.dtype.itemsize

    def disk(self) -> dict[str, float]:
        """Bytes by use that training leaves on disk or needs there temporarily."""
        state = 4 * self.parameters + optimizer_bytes(self.drafter, self.recipe.optimizer_type)
        share = fp8_share(self.outline.hidden_size, self.outline.dtype) if self.recipe.features.fp8 else 1
        return {
            "checkpoints": (self.recipe.checkpoint.keep + 1) * state,  # + 1: an old one is deleted last
            "drafter": 4 * self.parameters,
            "distilled data": self.scale * sum(len(one.tokens) for one in self.whole) * JSON_BYTES,
            "features": self.kept * share if self.mode in {*ON_DISK, "stream"} else 0,
        }


def sample(texts: Texts, longest: int) -> list[Example]:
    """Sample texts with the mean lengths of `texts`, cut at `longest` tokens; response lengths vary evenly by ±
    `SPREAD` of the mean. A prompt that leaves no room for a response is taken as the longest that does."""
    count = max(1, min(texts.responses, SAMPLE))
    prompt = min(round(texts.prompt_tokens), longest - 2)
    examples = []
    for index in range(count):
        place = (2 * index + 1) / count - 1  # from −1 to 1
        length = max(2, round(texts.response_tokens * (1 + SPREAD * place)))
        examples.append(Example(index, "", range(min(prompt + length, longest)), prompt))
    return examples


def drafter_flops(drafter: nn.Module, passes: float, texts: Texts) -> float:
    """Training FLOPs per response token: 2 per parameter forward and 4 backward, in every pass. A drafter that reads no
    features also runs over the prompts; others compute inputs, keys and values for them, and their `prompt_layers`."""
    prompts, size = texts.length - 1, matrix_parameters(drafter)
    if not reads_features(drafter):
        return 6 * size * (1 + prompts)
    return 6 * (size * (passes + PROMPT_COST * prompts) + (1 - PROMPT_COST) * prompt_parameters(drafter) * prompts)


def head_attention(drafter: nn.Module, passes: float, example: Example) -> float:
    """FLOPs of a head's attention over a text in a step: 4 per channel, query and key forward, 10 backward, as scores
    are computed again."""
    config = cast(DraftHead, drafter).config
    if not isinstance(config, HeadConfig):
        return 0.0
    sight = cast(DraftHead, drafter).sight or math.inf
    keys = min(sight, example.prompt_length + example.response_length / 2)
    return 14 * config.num_heads * config.head_dim * passes * example.response_length * keys


def forward_flops(outline: Outline, length: int) -> float:
    """FLOPs of the target's forward over a text: 2 per parameter and token, and 4 per layer, channel, token and earlier
    token."""
    heads, dim = _heads(outline)
    return 2 * outline.active * length + 2 * outline.num_layers * heads * dim * length**2


def prompt_bytes(drafter: nn.Module, outline: Outline) -> float:
    """Bytes that a step keeps for a token before the response, which is only a key and a value of the attention.
    Measured with three taps: 13 to 18 hidden states in fp32 for eagle3, 21 to 24 for peagle and dflash."""
    return 4 * outline.hidden_size * (5 + 3 * len(cast(DraftHead, drafter).taps))


def _heads(outline: Outline) -> tuple[int, int]:
    """Number and size of the target's attention heads; zeros for a target without attention."""
    config = outline.config
    heads = value_of_all_layers(config, "num_attention_heads", None) or 0
    return heads, value_of_all_layers(config, "head_dim", None) or outline.hidden_size // max(1, heads)


def feature_bytes(drafter: nn.Module, outline: Outline, texts: Texts) -> float:
    """Feature bytes per response token: tapped states, including the prompt's share, and one last hidden state. 0 for a
    drafter that reads no features."""
    if not isinstance(drafter, DraftHead):
        return 0.0
    return outline.hidden_size * outline.dtype.itemsize * (len(drafter.taps) * texts.length + 1)


def optimizer_bytes(drafter: nn.Module, kind: str) -> int:
    """Bytes of optimizer state: AdamW keeps two fp32 moments per parameter; Muon keeps one, for hidden matrices
    only."""
    total = 0
    for name, parameter in drafter.named_parameters():
        hidden = parameter.ndim == 2 and not is_embedding_like(name)
        total += parameter.numel() * (4 if kind == "muon" and hidden else 8)
    return total


def state_bytes(drafter: nn.Module, kind: str, stage: int, processes: int) -> float:
    """Bytes of the drafter's weights, gradients and optimizer state in one process: 16 per parameter with AdamW.

    ZeRO 1 divides the optimizer state, 2 also the gradients, 3 also the weights. From stage 1 on, each process also has
    an fp32 copy of its part of the weights, which the optimizer updates.
    """
    size = 4 * sum(p.numel() for p in drafter.parameters())
    weights, gradients, optimizer = (processes if stage >= at else 1 for at in (3, 2, 1))
    copy = size / processes if stage else 0
    return size / weights + size / gradients + optimizer_bytes(drafter, kind) / optimizer + copy


def activation_bytes(drafter: nn.Module, tokens: float, passes: float, texts: Texts, dtype: torch.dtype) -> float:
    """Bytes that a step over `tokens` response tokens keeps for its backward pass.

    This counts the input and output of every linear layer and the fp32 inputs of norms. The vocabulary head adds the
    gradient that the loss computes ahead of the backward pass, and the teacher's row in fp32 and in `dtype`.
    """
    size = dtype.itemsize
    row = 0.0
    layers = drafter.prompt_layers if isinstance(drafter, DraftHead) else ()
    with_prompts = {id(module) for layer in layers for module in layer.modules()}
    for name, module in drafter.named_modules():
        rows = passes + (texts.length - 1 if id(module) in with_prompts else 0)
        if isinstance(module, nn.Linear):
            row += (module.in_features + module.out_features) * size * rows
            if "lm_head" in name:
                row += module.out_features * (size * (passes + 1) + 4)
        elif type(module).__name__.endswith("Norm"):  # of torch or of transformers
            row += 8 * rows * sum(p.numel() for p in module.parameters())
    return row * tokens * (1 if reads_features(drafter) else texts.length)


def forward_bytes(outline: Outline, machine: Machine, longest: int) -> float:
    """Peak bytes of one forward of the target over `PASS_TOKENS` tokens, or over a chunk of the `longest` text: KV
    cache of all its tokens, one layer, some logits."""
    kind = "cpu" if machine.gpu == "cpu" else "cuda"
    rows = max(PASS_TOKENS[kind], min(longest, CHUNK_TOKENS[kind]))
    config, size, width = outline.config, outline.dtype.itemsize, outline.hidden_size
    heads, dim = _heads(outline)
    heads = value_of_all_layers(config, "num_key_value_heads", None) or heads
    inner = value_of_all_layers(config, "intermediate_size", None) or 4 * width
    layer = 2 * heads * dim * size
    if machine.shards > 1 or lean.unsupported_reason(config):
        layer += width * size  # transformers returns the states of all layers
    cached = layer * outline.num_layers / machine.shards * max(rows, longest)
    return cached + rows * (3 * inner * size + 12 * width) + HEAD_ROWS * outline.vocab_size * (size + 4)


def advice(memory: dict[str, float], room: float, recipe: TrainRecipe, machine: Machine, batch: int) -> list[str]:
    """Recipe keys that make the training fit, with the key for the largest use first. `room` is minus the missing
    bytes."""
    of_batch = memory["activations"] + memory.get("features", 0)
    key, now = ("piece_length", recipe.piece_length) if recipe.piece_length else ("batch_tokens", batch)
    fitting = int(now * (1 + room / of_batch)) // 64 * 64
    spread = "fewer processes, which gives each more GPUs for its target"
    knobs = {"target": spread if machine.shards > 1 else "target.device_map=auto and several GPUs for each process"}
    if recipe.trains_without_layers and recipe.features.whole_target:
        knobs["target"] = "features.whole_target=false"
    if machine.processes > 1 and recipe.zero_stage < 3:
        knobs["drafter"] = f"zero_stage={recipe.zero_stage + 1}"
    if fitting > 0:
        knobs["activations"] = f"{key}={fitting} (now {now})"
    ordered = sorted(knobs, key=lambda name: -memory.get(name, 0))
    return [knobs[name] for name in ordered]


def _waiting(useful: float, processes: int) -> str:
    if processes == 1:
        return ""
    return f", of which processes wait {1 - useful:.1%} for the slowest one (lengths ± {SPREAD:.0%})"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def duration(hours: float) -> str:
    """A time in words."""
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _sizes(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {size:.2g}" for name, size in parts.items() if size)
