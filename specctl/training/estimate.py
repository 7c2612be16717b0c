"""Estimate the memory, disk space and time of `train-drafter` from the recipe and the target's configuration alone.

The estimate measures nothing and reads no weights: target and drafter are built on torch's meta device and counted. The
formulas describe this code base (fp32 master weights, autocast, no gradient accumulation). Two guesses are reported
with the result: the share of a device's peak that training reaches, and the length of texts that do not exist yet.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from specctl.decoding.models import lean
from specctl.decoding.models.loading import load_config
from specctl.decoding.models.supported import engine_only_reason
from specctl.decoding.target import Target
from specctl.drafters.feature.head import DraftHead
from specctl.recipe import TrainRecipe
from specctl.training.balancing import Batch, balanced_rows, batches, rebalance, useful_share
from specctl.training.example import Example
from specctl.training.feature_files import ON_DISK, fp8_share
from specctl.training.machine import DEVICES, GB, Machine, machine_for
from specctl.training.optimizers import EMBEDDING_LIKE
from specctl.training.schedule import Schedule, batch_tokens
from specctl.training.step_cost import matrix_parameters, passes, prompt_parameters, reads_features, step_work
from specctl.training.target_outline import Outline

HEADROOM = 0.9  # usable share of a GPU's memory: CUDA context, collective buffers and fragmentation take the rest
FORWARD_TOKENS = 16_384  # most tokens, padding included, in one forward of the target
HEAD_ROWS = 4096  # most rows of target logits at a time
STEP_SECONDS = 0.05  # least time of a step on GPUs: kernel launches, gradient exchange, host work
SPREAD = 0.4  # response lengths lie within the mean ± this share of the mean
SAMPLE = 2048  # number of texts that represent all texts
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
            f"estimate: {_count(self.loaded_parameters)} parameters of the target are loaded: embedding, final norm "
            "and vocabulary head, without its layers (features.whole_target=true loads them)"
        )
        return [
            f"estimate: {_count(self.target_parameters)} parameters in the target, {_count(self.drafter_parameters)} "
            f"in the drafter; {self.responses:,} responses of {length}",
            *([ends] if self.loaded_parameters < self.target_parameters else []),
            f"estimate: {self.steps:,} steps, {self.flops:.2g} FLOPs, {_time(self.hours)} on {self.gpus} × {self.gpu} "
            f"at {self.utilisation:.0%} of peak (an assumption){_waiting(self.useful_share, self.processes)}; "
            "distillation and acceptance checks not included",
            f"estimate: {sum(self.memory_gb.values()):.3g} of {self.memory_limit_gb:.3g} GB memory per {per} "
            f"({_sizes(self.memory_gb)}): {fit}",
            f"estimate: {sum(self.disk_gb.values()):.3g} GB on disk ({_sizes(self.disk_gb)})",
        ]


def estimate(recipe: TrainRecipe, config: Any, machine: Machine, texts: Texts) -> Estimate:
    """Estimate the cost of a recipe for a drafter family with weights; `config` is the target's, from `load_config`."""
    outline = Outline.of(config, machine.target_dtype(recipe.target.dtype, config))
    planned = PlannedTraining(recipe, outline, machine, texts, loads_layers(recipe, outline, machine))
    epoch, useful = planned.epoch()
    batch = planned.batch_tokens if machine.processes == 1 else mean_tokens(epoch)
    steps = Schedule.of(recipe, planned.target, max(1, round(texts.tokens / batch))).steps
    flops = planned.flops(steps, batch)
    seconds = max(flops / useful / machine.flops, steps * STEP_SECONDS if machine.gpu != "cpu" else 0)
    memory, disk = planned.memory(max(planned.batch_tokens, batch) / machine.processes), planned.disk()
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
    memory = planned.memory(batch_tokens(recipe, planned.target) / machine.processes)
    return sum(memory.values()) <= HEADROOM * machine.memory_gb * GB


def loads_layers_here(recipe: TrainRecipe) -> bool:
    """Whether training on this machine loads the whole target (`loads_layers`). If the recipe leaves that open, it does
    on a GPU that the table does not know, and under tensor parallelism, unless only an engine can run the target."""
    chosen, machine = recipe.features.whole_target, machine_for(recipe)
    if chosen is not None or not recipe.trains_without_layers:
        return chosen is not False
    config = load_config(**recipe.target.described)
    if engine_only_reason(config) is not None:
        return False
    if recipe.target.tensor_parallel > 1 or machine is None:
        return True
    return loads_layers(recipe, Outline.of(config, machine.target_dtype(recipe.target.dtype, config)), machine)


class PlannedTraining:
    """A training run that has not begun, with the resources it would need.

    Attributes:
        target: the outline, on the type of device that the target would run on.
        features: bytes of the target features of all texts, in any mode; 0 if the drafter reads none.
        kept: bytes of the features that exist at a time.
        mode: features.mode with `auto` decided: `memory` if the features are within the budget, else `online`.
        loaded: number of the target's parameters that are loaded.
    """

    def __init__(
        self, recipe: TrainRecipe, outline: Outline, machine: Machine, texts: Texts, loads_layers: bool = True
    ):
        self.recipe, self.outline, self.machine, self.texts = recipe, outline, machine, texts
        self.loads_layers, self.loaded = (
            loads_layers,
            outline.parameters if loads_layers else outline.non_layer_parameters,
        )
        self.drafter = outline.drafter(recipe)
        self.parameters = sum(p.numel() for p in self.drafter.parameters())
        device = torch.device("cpu" if machine.gpu == "cpu" else "cuda")
        self.target = cast(Target, replace(outline, device=device))
        self.batch_tokens = batch_tokens(recipe, self.target, texts.tokens)
        self.depth = passes(self.drafter, recipe, self.target)
        self.features = texts.tokens * feature_bytes(self.drafter, outline, texts)
        self.mode: str = recipe.features.mode
        if self.mode == "auto":
            budget = recipe.features.budget_gb * 2**30 * machine.processes
            self.mode = "memory" if self.features <= budget else "online"
        ahead = min(1.0, recipe.features.ahead / max(1, texts.responses))
        self.kept = self.features * {"online": 0.0, "stream": ahead}.get(self.mode, 1.0)

    def epoch(self) -> tuple[list[Batch], float]:
        """Batches of an epoch on sample texts, and the share of the processes' time that is not spent waiting."""
        runs_target = self.features and self.mode == "online"
        work = step_work(self.drafter, self.recipe, self.target, 2.0 * self.outline.active if runs_target else 0.0)
        dealt = balanced_rows(sample(self.texts), self.machine.processes, work)
        epoch = batches(dealt, self.batch_tokens, seed=0, epoch=0)
        return epoch, useful_share(
            epoch if self.mode == "memory" else [rebalance(batch, work) for batch in epoch], work
        )

    def flops(self, steps: int, batch: float) -> float:
        """FLOPs of `steps` steps with `batch` response tokens each, plus the target's forward passes that run here."""
        found = steps * batch * drafter_flops(self.drafter, self.depth, self.texts)
        if self.features and not self.recipe.features.is_served and self.loads_layers:
            tokens = steps * batch if self.mode == "online" else self.texts.tokens
            found += 2 * self.outline.active * self.texts.length * tokens
        return found

    def memory(self, tokens: float) -> dict[str, float]:
        """Peak bytes by use of a process that takes `tokens` response tokens per step, on its GPU if it has one.
        Features that are kept in memory are in host memory, so they count only on a CPU."""
        recipe, outline, machine = self.recipe, self.outline, self.machine
        compute = machine.dtype(recipe.precision)
        found = {
            "target": self.loaded * outline.dtype.itemsize / (machine.shards if self.loads_layers else 1),
            "drafter": state_bytes(self.drafter, recipe.optimizer_type, recipe.zero_stage, machine.processes),
            "activations": activation_bytes(self.drafter, tokens, self.depth, self.texts, compute),
        }
        if compute.itemsize < 4:
            found["autocast"] = self.parameters * compute.itemsize  # a copy of the weights in lower precision
        if self.features:
            in_memory = self.mode in ("memory", "stream") and machine.gpu == "cpu"
            kept = self.kept / machine.processes if in_memory else 0
            batches = 1 if self.mode == "online" or machine.gpu == "cpu" else 2  # a GPU also holds the next batch
            found["features"] = batches * tokens * feature_bytes(self.drafter, outline, self.texts) + kept
            if self.loads_layers:
                found["target's forward"] = forward_bytes(outline, machine)
        return found

    def disk(self) -> dict[str, float]:
        """Bytes by use that training leaves on disk or needs there temporarily."""
        state = 4 * self.parameters + optimizer_bytes(self.drafter, self.recipe.optimizer_type)
        share = fp8_share(self.outline.hidden_size, self.outline.dtype) if self.recipe.features.fp8 else 1
        return {
            "checkpoints": (self.recipe.checkpoint.keep + 1) * state,  # + 1: an old one is deleted last
            "drafter": 4 * self.parameters,
            "distilled data": self.texts.tokens * self.texts.length * JSON_BYTES,
            "features": self.kept * share if self.mode in {*ON_DISK, "stream"} else 0,
        }


def sample(texts: Texts) -> list[Example]:
    """Sample texts with the mean lengths of `texts`; response lengths vary evenly by ± `SPREAD` of the mean."""
    count = max(1, min(texts.responses, SAMPLE))
    examples = []
    for index in range(count):
        place = (2 * index + 1) / count - 1  # from −1 to 1
        length = max(2, round(texts.response_tokens * (1 + SPREAD * place)))
        examples.append(Example(index, "", [0] * (round(texts.prompt_tokens) + length), round(texts.prompt_tokens)))
    return examples


def mean_tokens(epoch: list[Batch]) -> float:
    return sum(example.response_length for batch in epoch for share in batch for example in share) / len(epoch)


def drafter_flops(drafter: nn.Module, passes: float, texts: Texts) -> float:
    """Training FLOPs per response token: 2 per parameter forward and 4 backward, in every pass. A drafter that reads no
    features also runs over the prompts; for the other drafters prompts are neglected, except in `prompt_layers`."""
    rows = passes if reads_features(drafter) else texts.length
    return 6 * (matrix_parameters(drafter) * rows + prompt_parameters(drafter) * (texts.length - 1))


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
        hidden = parameter.ndim == 2 and not any(part in name for part in EMBEDDING_LIKE)
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


def forward_bytes(outline: Outline, machine: Machine) -> float:
    """Peak bytes of one forward of the target over `FORWARD_TOKENS` tokens: KV cache, one layer, some logits."""
    config, size, width = outline.config, outline.dtype.itemsize, outline.hidden_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or 4 * width
    layer = 2 * heads * dim * size
    if machine.shards > 1 or lean.unsupported_reason(config):
        layer += width * size  # transformers returns the states of all layers
    row = layer * outline.num_layers / machine.shards + 3 * inner * size + 12 * width
    return FORWARD_TOKENS * row + HEAD_ROWS * outline.vocab_size * (size + 4)


def advice(memory: dict[str, float], room: float, recipe: TrainRecipe, machine: Machine, batch: int) -> list[str]:
    """Recipe keys that make the training fit, with the key for the largest use first. `room` is minus the missing
    bytes."""
    of_batch = memory["activations"] + memory.get("features", 0)
    fitting = int(batch * (1 + room / of_batch)) // 64 * 64
    spread = "fewer processes, which gives each more GPUs for its target"
    knobs = {"target": spread if machine.shards > 1 else "target.device_map=auto and several GPUs for each process"}
    if recipe.trains_without_layers and recipe.features.whole_target:
        knobs["target"] = "features.whole_target=false"
    if machine.processes > 1 and recipe.zero_stage < 3:
        knobs["drafter"] = f"zero_stage={recipe.zero_stage + 1}"
    if fitting > 0:
        knobs["activations"] = f"batch_tokens={fitting} (now {batch})"
    ordered = sorted(knobs, key=lambda name: -memory.get(name, 0))
    return [knobs[name] for name in ordered]


def _waiting(useful: float, processes: int) -> str:
    if processes == 1:
        return ""
    return f", of which processes wait {1 - useful:.1%} for the slowest one (lengths ± {SPREAD:.0%})"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _sizes(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {size:.2g}" for name, size in parts.items())
