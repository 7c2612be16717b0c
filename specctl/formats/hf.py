"""An independent drafter as a plain `transformers` directory with the target's tokenizer."""

from __future__ import annotations

from transformers import LlamaConfig

from specctl.formats.foreign import Foreign
from specctl.formats.head import Facts, Files, Head


def write(head: Head, facts: Facts) -> Files:
    """Loads with AutoModelForCausalLM and AutoTokenizer."""
    config = LlamaConfig(**head.architecture)
    config.architectures = ["LlamaForCausalLM"]
    return Files(config.to_dict(), head.tensors, tokenizer=True)


def claims(found: Foreign) -> bool:
    return "model.embed_tokens.weight" in found.tensors


def read(found: Foreign, facts: Facts) -> Head:
    """A Llama with the target's vocabulary. CheckpointError for another architecture or vocabulary."""
    kind = found.config.get("model_type")
    if kind != "llama":
        raise found.refuse("model_type", repr(kind), "a Llama: no other independent drafter can be imported")
    embedding, rows = found.tensors["model.embed_tokens.weight"], found.config.get("vocab_size")
    if rows != len(embedding):
        raise found.refuse("vocab_size", rows, f"{found.file.name} has an embedding of {len(embedding)} rows")
    if rows != facts.vocab_size:
        raise found.refuse("vocab_size", rows, f"the target's, {facts.vocab_size}: engines compare them, too")
    tensors = {name: tensor for name, tensor in found.tensors.items() if not name.endswith(".inv_freq")}
    tensors.setdefault("lm_head.weight", embedding.clone())  # tied: ours are two
    ignored = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path")
    config = LlamaConfig(**{key: value for key, value in found.config.items() if key not in ignored})
    config.tie_word_embeddings = False
    return Head("lm", config.to_diff_dict(), tensors)
