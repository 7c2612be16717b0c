"""The target: any decoder-only causal LM of `transformers`, with its tokenizer. `loading` finds and reads it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specctl.decoding.cache import KVCache
from specctl.decoding.models import lean
from specctl.decoding.models.chat import Renderer
from specctl.decoding.models.identity import weights_digest
from specctl.decoding.models.loading import keep_freed_memory, load_model, load_tokenizer, pick_device, pick_dtype
from specctl.decoding.models.supported import context_limit, unusable, why_unusable
from specctl.decoding.plan import Plan, plan_rows
from specctl.errors import CheckpointError, DataError, UsageError
from specctl.kernels.distill import Squash

if TYPE_CHECKING:
    from specctl.decoding.models.hf import HFModel


class Model(Protocol):
    """A model as a target needs it: `LeanModel` or `HFModel`."""

    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    embedding: Tensor

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...
    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Target:
    """A loaded target and its tokenizer.

    Attributes:
        model: runs the steps (`LeanModel` or `HFModel`).
        identity: what a drafter is checked against: name, hidden size, layers, vocabulary size and hash; and what a run
            that goes on is checked against besides: `weights_digest`.
        eos_ids: ids that end a response.
        context_length: longest sequence the target was made for.
        row_flops: of the products of one row with all weights, attention aside; of a mixture, with all experts.
        head_weight, squash: [V, H] its vocabulary head, and what becomes of the products with it: its logits.

    With `consume` the weights of `model` become the target's alone: nobody else may use it afterwards.
    """

    def __init__(
        self,
        name: str,
        model,
        tokenizer,
        *,
        revision: str | None = None,
        path: str = "auto",
        weights: str | None = None,
        consume: bool = False,
    ):
        reason = lean.why_not(model.config)
        if not type(model).__module__.startswith("transformers.models."):
            reason = reason or "the model brings code of its own"
        if len({parameter.device for parameter in model.parameters()}) > 1:
            reason = reason or "its layers are on several devices"
        if path == "lean" and reason:
            raise UsageError(
                f"the lean step cannot run target {name}: {reason}", "use the path 'auto' or 'transformers'"
            )
        self.name = name
        self._renderer: Renderer | None = None
        self.config = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.path = "transformers" if reason or path == "transformers" else "lean"
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        count = sum(parameter.numel() for parameter in model.parameters())  # tied ones come once
        self.row_flops = 2 * (count - (0 if head is embedding else embedding.numel()))
        _check_finite(name, model, head)
        if self.path == "lean":
            self.model: Model = lean.LeanModel(model, consume)
        else:
            self.model = _tried(name, model)
        self.device, self.dtype = self.model.device, self.model.dtype
        self.vocab_size = self.model.embedding.shape[0]
        self.hidden_size = self.model.hidden_size
        self.num_layers = self.config.num_hidden_layers
        self.context_length = context_limit(self.config) or int(tokenizer.model_max_length)
        self.eos_ids = eos_ids(model.generation_config, model.config, tokenizer)
        self.generation_config = model.generation_config
        self.head_weight: Tensor = head.detach().to(self.device)
        self.squash = Squash() if self.path == "lean" else _squash(self.model, self.head_weight, self.config)
        self.norm_weight = _norm_weight(getattr(getattr(model, "model", None), "norm", None))
        self.identity: dict[str, Any] = {
            "name": name,
            "revision": revision,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "vocab_hash": vocab_hash(tokenizer),
            "weights": weights,
        }

    def render(self, messages: list[dict[str, str]], **chat_template_kwargs: Any) -> list[int]:
        """Prompt ids of a conversation, with the generation prompt appended.

        Raises:
            DataError: there is no chat template; as ChatTemplateError: it refuses the conversation, or fails on it.
            CheckpointError: it takes more time or memory than `chat` allows.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise DataError(
                f"target {self.name} has no chat template",
                "add chat_template.jinja to the model directory (a base model can use '{{ messages[0].content }}')",
            )
        if self._renderer is None or not self._renderer.serves(self.tokenizer):
            self._renderer = Renderer(self.tokenizer)
        return self._renderer(self.name, messages, chat_template_kwargs)

    def opening(self) -> list[int]:
        """Ids that a document of this target begins with: what the chat layout puts before a user's first words, or the
        token that begins every text. Behind them the target writes as it pleases (Magpie, Xu et al. 2024)."""
        if getattr(self.tokenizer, "chat_template", None) is not None:
            one, other = (self.render([{"role": "user", "content": text}]) for text in ("a", "1"))
            same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
            if same:
                return one[:same]
        begin = self.tokenizer.bos_token_id
        return [begin if begin is not None else min(self.eos_ids)]

    @torch.inference_mode()
    def prefill(
        self, prompts: list[list[int]], cache: KVCache, taps: tuple[int, ...] = (), slots: list[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run prompts into `slots` of the cache (None = all of them, in order).

        Returns (logits of each last row [n, V], h [n, P, H], taps [n, P, F]), padded at the right. A whole batch is run
        as one, padded, on a GPU. A CPU gains nothing from a batch of prompts, and padding is work: one by one.
        """
        slots = list(range(len(prompts))) if slots is None else slots
        if cache.batch > 1 and (self.device.type == "cpu" or len(slots) < cache.batch):
            alone = [self.prefill([text], cache.sequence(b), taps) for text, b in zip(prompts, slots, strict=True)]
            last = torch.cat([logits for logits, _, _ in alone])
            states = pad_sequence([hidden[0] for _, hidden, _ in alone], batch_first=True)
            kept = [tapped[0] for _, _, tapped in alone if tapped is not None]
            return last, states, pad_sequence(kept, batch_first=True) if kept else None
        width = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        plan = plan_rows([0] * len(prompts), width, device=self.device, dtype=self.dtype)
        hidden, tapped = self.model.forward(tokens.to(self.device), cache, plan, taps)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        rows = hidden[torch.arange(len(prompts), device=self.device), last]
        return self.model.logits(rows), hidden, tapped

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One forward of T rows per sequence. Returns (logits [B, T, V], h [B, T, H], taps [B, T, F])."""
        hidden, tapped = self.model.forward(tokens, cache, plan, taps)
        return self.model.logits(hidden), hidden, tapped


def vocab_hash(tokenizer) -> str:
    """16 hex digits over the sorted (token, id) pairs: equal iff two tokenizers share their vocabulary."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()[:16]


@torch.inference_mode()
def _squash(model: Model, weight: Tensor, config: Any) -> Squash:
    """Measured, but for the cap: of two configurations with `logits_scaling` one multiplies by it, one divides."""
    states = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    products = (states @ weight.T).float()
    states /= 10 * products.std()  # small products: a cap leaves them as they are
    products = (states @ weight.T).float()
    shift = model.logits(torch.zeros_like(states))[0].float()
    added = model.logits(states).float() - shift
    scale = (torch.sum(added * products) / torch.sum(products * products)).item()
    cap = getattr(config, "final_logit_softcapping", None)
    return Squash(1.0 if abs(scale - 1) < 0.01 else scale, cap, shift if shift.any() else None)


def _check_finite(name: str, model, head_weight: Tensor) -> None:
    """Look at the final norm and one row of the vocabulary head: where a file was filled with NaN, so were these."""
    norm = getattr(getattr(getattr(model, "model", None), "norm", None), "weight", None)
    for key, weight in (("model.norm.weight", norm), ("lm_head.weight", head_weight[0])):
        if weight is not None and not weight.isfinite().all():
            raise CheckpointError(
                f"target {name}: {key} holds values that are not finite: its weights are damaged", "copy them again"
            )


@torch.no_grad()
def _norm_weight(norm) -> Tensor | None:
    """The weight of the final norm. Gemma and some others store it minus one."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    added = (norm(torch.ones_like(weight)) - weight).float().mean().item()  # of a row whose root mean square is 1
    return weight + 1 if round(added) == 1 else weight


def _tried(name: str, model) -> HFModel:
    """The model behind its own forward, after a trial that it can verify drafts. CheckpointError where it cannot."""
    from specctl.decoding.models.hf import HFModel
    from specctl.decoding.models.self_check import trial

    reason = why_unusable(model.config, type(model))
    if reason is None:
        try:
            wrapped = HFModel(model)
        except Exception as error:  # whatever the code of an unknown architecture raises
            reason = f"its code does not take a cache from outside ({type(error).__name__}: {error})"
        else:
            reason = trial(wrapped)
    if reason is not None:
        raise unusable(name, reason)
    return wrapped


def eos_ids(generation_config, config, tokenizer) -> frozenset[int]:
    """All ids that end a response, wherever they are written down. CheckpointError where one of them is none."""
    ids: list[Any] = []
    for source in (generation_config, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in ids):
        where = getattr(config, "_name_or_path", "") or "the target"
        raise CheckpointError(f"{where}: eos_token_id is {sorted(map(str, ids))!r:.60}, not a list of token ids")
    return frozenset(ids)


def load_target(
    name: str = "builtin",
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    max_memory: str | None = None,
    path: str = "auto",
) -> Target:
    """Load a target with its tokenizer. Raises CheckpointError when it cannot be used, naming what and where.

    device_map: how `accelerate` spreads the layers over the GPUs of this process; max_memory: at most so much of each.
    """
    where = pick_device(device)
    if where.type == "cpu":
        keep_freed_memory()
    model = load_model(
        name,
        device=where,
        dtype=pick_dtype(dtype, where),
        revision=revision,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        max_memory=max_memory,
    )
    tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    weights = weights_digest(name, revision)
    target = Target(name, model, tokenizer, revision=revision, path=path, weights=weights, consume=True)
    if where.type == "cuda":
        torch.cuda.empty_cache()  # what was packed left holes, which nobody but torch could use
    return target
