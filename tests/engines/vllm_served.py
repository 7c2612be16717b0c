"""Run by the interpreter of an environment with vLLM: a target with a drafter answers prompts greedily in fp32.

argv: a JSON file with {"target", "speculative", "prompts" (token ids), "max_tokens"} and optionally
"additional_config", and a path for the result: {"texts" (token ids), "drafts", "drafted", "accepted", "accepted_at"},
by the engine's own counters.
"""

import json
import sys

from vllm import LLM, SamplingParams

COUNTERS = {"num_drafts": "drafts", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}


def main() -> None:
    given, result = sys.argv[1:]
    with open(given) as file:
        job = json.load(file)
    llm = LLM(
        model=job["target"],
        speculative_config=job["speculative"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=1024,
        additional_config=job.get("additional_config", {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling)
    counts = {"texts": [list(answer.outputs[0].token_ids) for answer in answers]}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTERS:
            counts[COUNTERS[name]] = metric.value
        elif name == "num_accepted_tokens_per_pos":
            counts["accepted_at"] = metric.values
    with open(result, "w") as file:
        json.dump(counts, file)


if __name__ == "__main__":
    main()
