"""Description of a target from its configuration and tokenizer, without reading weights."""

from dataclasses import dataclass

from specctl.decoding.models import gguf_target, lean
from specctl.decoding.models.ends import model_on_meta
from specctl.decoding.models.loading import (
    DTYPES,
    first_line,
    is_gguf,
    load_config,
    load_generation_config,
    load_tokenizer,
    pick_device,
)
from specctl.decoding.models.supported import (
    context_limit,
    engine_only_reason,
    quantisation,
    ropes,
    value_of_all_layers,
    window_size,
)
from specctl.decoding.target_text import eos_ids
from specctl.errors import CheckpointError


@dataclass(frozen=True)
class Description:
    """A target as its configuration and tokenizer describe it.

    Attributes:
        path, why: "lean", "transformers", or "engine" if only an engine can run it, and the reason for it.
        dtype: choice of `--dtype auto` on this machine; bytes: size of all parameters in memory, in this dtype or
            quantized. A head that is tied to the embedding takes further memory if it is packed for the CPU.
        checkpoint_dtype: dtype of the stored weights, if the configuration names it; for a GGUF file its quantizations.
        quantized: whether the layers of a GGUF file stay quantized on this machine.
        kv_heads, head_dim: as configured, or None if layers differ.
        context_length: longest sequence; trained_context: the model's context length, if it is longer.
        rope: kinds of rotary embedding; empty without RoPE.
        features: highest id of a hidden state that feature drafters can read; 0 is the embeddings.
        chat_template: whether there is one. Without a tokenizer it is None, and `eos_ids` come from the configuration
            alone.
    """

    target: str
    architecture: str
    model_type: str
    path: str
    why: str
    dtype: str
    parameters: int
    bytes: int
    checkpoint_dtype: str | None
    quantized: bool
    layers: int
    hidden_size: int
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab_size: int
    context_length: int | None
    trained_context: int | None
    rope: list[str]
    sliding_window: int | None
    tied_head: bool
    features: int
    eos_ids: list[int]
    chat_template: bool | None


def path_of(config) -> tuple[str, str]:
    """Path of a configuration (as `load_config` returns it): "lean", "transformers" or "engine", and the reason."""
    reason = engine_only_reason(config)
    if reason is not None:
        return "engine", reason
    if reason := lean.reason_here(config):
        return "transformers", reason
    fp8 = ", and its fp8 weights are dequantized" if quantisation(config) is not None else ""
    return "lean", f"{config.model_type} is one of its architectures{fp8}"


def describe(name: str, label: str | None = None) -> Description:
    """Describe the target `name`, shown as `label`. CheckpointError if it cannot be used."""
    config = load_config(name)
    text = config.get_text_config()
    path, why = path_of(config)
    try:
        model = model_on_meta(config)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    except Exception as error:  # an architecture's code may raise anything for unusual sizes
        raise CheckpointError(
            f"transformers cannot build target {label or name} from its configuration: {first_line(error)}",
            "compare config.json with the original file of the model",
        ) from error
    device = pick_device("auto")
    dtype = lean.pick_target_dtype("auto", device, config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = parameters * dtype.itemsize
    quantized = lean.stored_weights(name, config, device, dtype) if path == "lean" else None
    if quantized is not None:
        size = sum(weight.nbytes for weight in quantized.values())
    heads = value_of_all_layers(text, "num_attention_heads", None)
    try:
        tokenizer = load_tokenizer(name)
    except CheckpointError:
        tokenizer = None
    generation = load_generation_config(name, config)
    stored = gguf_target.stored_as(name) if is_gguf(name) else getattr(config, "dtype", None)
    trained, limit = getattr(text, "max_position_embeddings", None), context_limit(text)
    return Description(
        target=label or name,
        architecture=type(model).__name__,
        model_type=config.model_type,
        path=path,
        why=why,
        dtype=next(short for short, kind in DTYPES.items() if kind == dtype),
        parameters=parameters,
        bytes=size,
        checkpoint_dtype=None if stored is None else str(stored).removeprefix("torch."),
        quantized=quantized is not None,
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        heads=heads,
        kv_heads=value_of_all_layers(text, "num_key_value_heads", heads),
        head_dim=value_of_all_layers(text, "head_dim", text.hidden_size // heads if heads else None),
        vocab_size=embedding.shape[0],
        context_length=limit,
        trained_context=trained if trained != limit else None,
        rope=list(ropes(text)),
        sliding_window=window_size(text),
        tied_head=head is embedding,
        features=text.num_hidden_layers,
        eos_ids=sorted(eos_ids(generation, config, tokenizer)),
        chat_template=None if tokenizer is None else getattr(tokenizer, "chat_template", None) is not None,
    )
