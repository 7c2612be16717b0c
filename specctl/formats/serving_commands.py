"""Engine commands that draft with a head directory, and the target architectures that each engine supports.

An EAGLE-3 head reads hidden states of intermediate layers, so the engine's model class has to return them. SGLang's
EAGLE-1 asks the class for its embedding and head. If the class lacks the interface, the engine stops at start. The
lists of classes come from the sources of `VERSIONS`.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specctl.decoding.models.loading import servable
from specctl.errors import UsageError
from specctl.formats.head import Deployment, LengthRange, Serving, TargetFacts

VERSIONS = {"vllm": "vLLM 0.32", "sglang": "SGLang 0.5.23"}


def _names(text: str) -> frozenset[str]:
    """Names of classes. The suffix `ForCausalLM` is left out in `text`."""
    return frozenset(name if re.search("For|LMHead", name) else f"{name}ForCausalLM" for name in text.split())


# vLLM's own classes without the interface `SupportsEagle3`. Targets without a class in vLLM run by the class of
# transformers, which has the interface.
_VLLM_WITHOUT_EAGLE3 = _names("""
    AriaForConditionalGeneration AXK1 Bloom Cohere Cohere2 Cohere2VisionForConditionalGeneration Dbrx
    Ernie4_5_Moe Ernie4_5_VLMoeForConditionalGeneration Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba Gemma Gemma2
    Gemma3 Gemma3ForConditionalGeneration Gemma3n Gemma3nForConditionalGeneration Glm4 Glm4Moe Glm4MoeLite
    Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration GPT2LMHeadModel
    GPTJ GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA HyperCLOVAX HYV3
    Idefics3ForConditionalGeneration InternS1ForConditionalGeneration InternVLForConditionalGeneration Jamba
    KimiLinear KimiVLForConditionalGeneration Lfm2 Lfm2Moe
    Lfm2VlForConditionalGeneration LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration
    LlavaOnevisionForConditionalGeneration LongcatFlash Mamba Mamba2 Mixtral
    Nemotron Olmoe OlmoHybrid OPT PaliGemmaForConditionalGeneration PhiMoE Qwen2_5OmniForConditionalGeneration
    Qwen2AudioForConditionalGeneration Qwen2Moe Qwen2VLForConditionalGeneration SmolVLMForConditionalGeneration
    StableLm VoxtralForConditionalGeneration Zamba2
""")
# SGLang's classes with `get_embed_and_head`, then the classes with `set_eagle3_layers_to_capture`.
_SGLANG_EAGLE = _names("""
    Apertus DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 Ernie4_5_Moe Exaone4 ExaoneMoe FalconH1 Gemma3
    Gemma3ForConditionalGeneration Gemma4 Gemma4ForConditionalGeneration Glm4 Glm4Moe Glm4MoeLite
    Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmMoeDsa GlmOcrForConditionalGeneration GptOss
    HYV3 HYV4 InternS1ProForConditionalGeneration KimiK25ForConditionalGeneration Laguna Llama Llama4
    Llama4ForConditionalGeneration LlavaForConditionalGeneration LongcatFlash Mellum MiMoV2Flash MiniMaxM2
    MiniMaxM3SparseForConditionalGeneration Ministral3 Mistral Mistral3ForConditionalGeneration NemotronH OPT Phi3
    PixtralForConditionalGeneration Qwen2 Qwen2_5_VLForConditionalGeneration Qwen3 Qwen3_5
    Qwen3_5ForConditionalGeneration Qwen3_5Moe Qwen3_5MoeForConditionalGeneration Qwen3Moe Qwen3Next
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
""")
_SGLANG_EAGLE3 = _names("""
    Apertus DeepseekV2 DeepseekV3 DeepseekV32 ExaoneMoe Gemma3 Gemma3ForConditionalGeneration Gemma4
    Gemma4ForConditionalGeneration Glm4Moe Glm4MoeLite GlmMoeDsa GptOss InternS1ProForConditionalGeneration
    KimiK25ForConditionalGeneration Llama Llama4 Llama4ForConditionalGeneration LongcatFlash Mellum MiniMaxM2
    MiniMaxM3SparseForConditionalGeneration Ministral3 Mistral Phi3 Qwen2 Qwen2_5_VLForConditionalGeneration
    Qwen2Moe Qwen3 Qwen3_5 Qwen3_5ForConditionalGeneration Qwen3_5Moe Qwen3_5MoeForConditionalGeneration Qwen3Moe
    Qwen3Next Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
""")
# Classes with `set_dflash_layers_to_capture`. Some classes have a separate hook for DSpark too.
_SGLANG_DFLASH = _names("""
    Beam DeepseekV2 DeepseekV3 DeepseekV32 Gemma4 Gemma4ForConditionalGeneration Glm4MoeLite GlmMoeDsa GptOss
    InklingForConditionalGeneration InternLM3 InternS1ProForConditionalGeneration IQuestCoder
    KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiK3Linear Laguna Lfm2 Lfm2Moe
    Lfm2VlForConditionalGeneration Llama Llama4 Mellum MiMoV2 MiMoV2Flash MiniMaxM3SparseForConditionalGeneration
    Ministral3 Mistral Nanbeige NemotronH Phi3 Qwen3 Qwen3_5 Qwen3_5ForConditionalGeneration Qwen3_5Moe
    Qwen3_5MoeForConditionalGeneration Qwen3Moe Qwen3Next Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration TeleFLM
""")
_SGLANG_DSPARK = _SGLANG_DFLASH | _names("BailingMoeV3 DeepseekV4 KimiLinear")
_WITHOUT = {
    ("vllm", "eagle3"): lambda name: name in _VLLM_WITHOUT_EAGLE3,
    ("vllm", "dflash"): lambda name: name in _VLLM_WITHOUT_EAGLE3,  # dflash needs the same interface
    ("vllm", "mtp"): lambda name: name != "MiMoForCausalLM",  # of the layers that ours can be
    ("sglang", "NEXTN"): lambda name: name != "MiMoForCausalLM",
    ("vllm", "dspark"): lambda name: name in _VLLM_WITHOUT_EAGLE3,
    ("sglang", "EAGLE3"): lambda name: name not in _SGLANG_EAGLE3,
    ("sglang", "EAGLE"): lambda name: name not in _SGLANG_EAGLE,
    ("sglang", "DFLASH"): lambda name: name not in _SGLANG_DFLASH,
    ("sglang", "DSPARK"): lambda name: name not in _SGLANG_DSPARK,
}
"""(Engine, its name of a method) → whether the engine refuses a target of this architecture."""
_HEADS = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "dflash": "DFlash", "dspark": "DSpark", "mtp": "MTP", "nextn": "MTP"}
V2_RUNNER = "vLLM 0.32 supports such heads only in its V2 model runner, which VLLM_USE_V2_MODEL_RUNNER=1 selects"

ADAPTIVE = "speculative_adaptive.json"
"""File with SGLang's draft lengths by load, next to the head's files."""
VLLM_SCHEDULES = [
    "if draft lengths depend on the load, vLLM 0.32 uses piecewise CUDA graphs, which a sweep at one length does not "
    "measure; VLLM_USE_V2_MODEL_RUNNER=1 gives full graphs. With data parallelism, vLLM ignores the lengths",
    "vLLM 0.32 also runs the head at draft length 0, to keep its state current: that is slower than no drafter",
]


NOT_BY_CONTEXT = {
    "vllm": "vLLM 0.32 cannot choose a draft length by context length, only by load (vllm-project/vllm#54801 proposes "
    "num_speculative_tokens_per_seq_len)",
    "sglang": "SGLang 0.5.23 cannot choose a draft length by context length, only by load and recent acceptance",
}
"""Sentence on what an engine cannot set."""


def refusal(engine: str, method: str, facts: TargetFacts) -> str | None:
    """Reason why an engine does not draft for this target by its method `method`.

    Returns None if the engine does, or if the target does not name its architecture.
    """
    refused = _WITHOUT.get((engine, method), lambda name: False)
    wrong = [name for name in facts.architectures if refused(name)]
    if not wrong:
        return None
    return (
        f"{VERSIONS[engine]} does not serve {_HEADS[method.lower()]} heads for {', '.join(wrong)} "
        f"({facts.text_config.model_type}): its model class lacks the interface. The files are for a version that has "
        "the interface"
    )


def refuse_schedule(to: str, family: str) -> None:
    """Raise UsageError if engine `to` cannot change the length of this family's drafts with the load."""
    if to not in VERSIONS:
        raise UsageError(
            f"draft lengths that depend on the load need an engine that supports them, and {to} does not",
            f"use --to {' or '.join(VERSIONS)}",
        )
    if to == "sglang" and family not in ("eagle", "eagle3"):
        raise UsageError(
            f"{VERSIONS[to]} adapts the draft length only of EAGLE and EAGLE-3, and this drafter is {family}",
            "use --to vllm, or leave out --tune",
        )


def adaptive_config(schedule: Sequence[LengthRange]) -> dict[str, dict[str, Any]]:
    """Content of the file for `--speculative-adaptive-config`, by the first batch size of a range.

    SGLang moves among the candidate lengths by the accepted lengths of recent drafts. The thresholds are its defaults.
    """
    hysteresis = {"up_hysteresis": 0.0, "down_hysteresis": -0.25, "ceiling_coeff": 0}
    return {str(one.first): {"candidate_steps": sorted(one.near), **hysteresis} for one in schedule}


def by_context(to: str, contexts: Mapping[tuple[int, int], Sequence[LengthRange]]) -> list[str]:
    """Notes with the schedule of every bracket of prompt lengths (over, up to), and on what engine `to` cannot set."""
    if not contexts:
        return []
    notes = []
    for (over, up_to), schedule in contexts.items():
        lengths = f"prompts of {over + 1} to {up_to} tokens"
        if not any(one.tokens for one in schedule):
            notes.append(f"{lengths}: serve them without a drafter")
        elif to == "sglang":
            notes.append(f"{lengths}: --speculative-adaptive-config {json.dumps(adaptive_config(schedule))}")
        else:
            value = [[one.first, one.last, one.tokens] for one in schedule]
            notes.append(f'{lengths}: "num_speculative_tokens_per_batch_size": {json.dumps(value)}')
    return [
        f"{NOT_BY_CONTEXT[to]}: start one server per range of prompt lengths, with the schedule of that range",
        *notes,
    ]


def speculative(method: Mapping[str, Any], use: Deployment) -> dict[str, Any]:
    """vLLM's speculative configuration of a method."""
    config = {**method, "num_speculative_tokens": use.tokens}
    if use.schedule:
        config["num_speculative_tokens_per_batch_size"] = [[one.first, one.last, one.tokens] for one in use.schedule]
    return config


def serving(
    engine: str, method: str, use: Deployment, options: Mapping[str, Any] | None = None, v2_runner: bool = False
) -> Serving:
    """The command line that serves the target with the drafter; only a note if the engine would refuse it.

    With a schedule the draft length follows the load. vLLM has `num_speculative_tokens_per_batch_size`: inclusive
    ranges from batch size 1 on, of which the last has no upper end. SGLang has `ADAPTIVE` (topk 1, EAGLE and EAGLE-3).
    `options`: further keys of vLLM's speculative configuration. `v2_runner`: vLLM supports the head only in its V2
    model runner.
    """
    note = refusal(engine, method, use.facts)
    if note is not None:
        return Serving([], [note])
    target, head = shlex.quote(servable(use.facts.name)), shlex.quote(str(use.place))
    revision = f" --revision {shlex.quote(use.facts.revision)}" if use.facts.revision else ""
    if engine == "vllm":
        spec = json.dumps(speculative({"method": method, "model": str(use.place)}, use) | dict(options or {}))
        runner, notes = ("VLLM_USE_V2_MODEL_RUNNER=1 ", [V2_RUNNER]) if v2_runner else ("", [])
        if use.schedule:
            notes = [*notes, *VLLM_SCHEDULES]
        return Serving([f"{runner}vllm serve {target}{revision} --speculative-config {shlex.quote(spec)}"], notes)
    # DFlash's block size includes the anchor. In DSpark every slot drafts.
    length = {
        "DFLASH": f"--speculative-dflash-block-size {use.tokens + 1}",
        "DSPARK": f"--speculative-dspark-block-size {use.tokens}",
    }.get(
        method,
        f"--speculative-num-steps {use.tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {use.tokens + 1}",
    )
    if use.schedule:
        length += f" --speculative-adaptive --speculative-adaptive-config {shlex.quote(str(use.place / ADAPTIVE))}"
    return Serving(
        [
            f"python -m sglang.launch_server --model-path {target}{revision} --speculative-algorithm {method} "
            f"--speculative-draft-model-path {head} {length}"
        ]
    )


def eagle_repository(use: Deployment, *, eagle3: bool) -> Serving:
    """The line of Python with which SafeAILab/EAGLE loads a head."""
    return Serving(
        [
            f"EaModel.from_pretrained(use_eagle3={eagle3}, base_model_path={servable(use.facts.name)!r}, "
            f"ea_model_path={str(use.place)!r})  # python, eagle.model.ea_model"
        ]
    )
