"""Export an independent drafter as a plain `transformers` directory with the target's tokenizer."""

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specctl.drafters.blueprint import build_or_raise, prefix_errors
from specctl.drafters.lm.config import check_plain, configuration, split_tensors, stored
from specctl.formats import serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

FILE_KEYS = ("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map")
"""Keys that describe the file, not the model."""
METHODS = {"vllm": "draft_model", "sglang": "STANDALONE"}


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """Files that load with AutoModelForCausalLM and AutoTokenizer, without a confidence head.

    A model of the target's family may pad the vocabulary to another size. Engines refuse it, so it gets the target's
    number of rows. Added rows repeat the last one: they are never more probable than a token.
    """
    config = configuration(head.architecture)
    tensors = split_tensors(head.tensors)[0]
    if config.vocab_size != facts.vocab_size:
        more = max(facts.vocab_size - config.vocab_size, 0)
        for name in vocabulary_tensors(config):
            rows = tensors[name]
            tensors[name] = torch.cat((rows[: facts.vocab_size], rows[-1:].expand(more, *rows.shape[1:])))
        config.vocab_size = facts.vocab_size
    held = replace(head, architecture=stored(config), tensors=tensors)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return Files(config.to_dict(), tensors, tokenizer=True, held=held)


def vocabulary_tensors(config: PretrainedConfig) -> set[str]:
    """Names of the tensors with a row for every token."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = [*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()]
    return {name for name, tensor in model.state_dict(keep_vars=True).items() if any(tensor is end for end in ends)}


def claims(found: HeadDirectory) -> bool:
    kind = found.config.get("model_type")
    return (
        isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "fc.weight" not in found.bare().tensors
    )


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """A causal LM with the target's vocabulary.

    Raises CheckpointError for another vocabulary, or if it is no causal LM.
    """
    kind, rows = found.config.get("model_type"), found.config.get("vocab_size")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise found.invalid("model_type", repr(kind), "must be a causal LM in transformers")
    if rows != facts.vocab_size:
        raise found.invalid("vocab_size", rows, f"must be the target's, {facts.vocab_size}: engines compare them too")
    kept = {key: value for key, value in found.config.items() if key not in FILE_KEYS and key[:1] != "_"}
    with prefix_errors(found.file.parent):
        check_plain(kept)
        config = build_or_raise(lambda: AutoConfig.for_model(**kept))
    tensors = dict(found.tensors)
    embedding = tensors.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and embedding is not None:  # files have one of the two names, modules both
        tensors.setdefault("lm_head.weight", embedding.clone())
    return Head("lm", stored(config), tensors)


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of an engine; for `hf`, of both engines. They draft so for every target."""
    found = [serving_commands.serving(name, METHODS[name], use) for name in (METHODS if to == "hf" else [to])]
    return Serving([line for one in found for line in one.commands], [note for one in found for note in one.notes])
