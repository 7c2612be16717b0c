"""Compare llama.cpp and specctl on the same weights, prompts and threads, one text at a time.

    python -m tests.benchmarks.llamacpp --python ENV/bin/python --target FILE.gguf --prompts FILE.jsonl [--drafter D] …

ENV has the package `xllamacpp` (`python -m venv ENV; ENV/bin/pip install xllamacpp`). llama.cpp decodes the file and
its weights in bf16, plainly and with n-gram drafts. We decode the weights in bf16, and the file plainly and with each
drafter (`lookup`, DIR, DIR+lookup). All sides take turns prompt by prompt. Tokens per second exclude the prompt.
Greedy texts are compared token by token: at the first difference, the gap between our two largest logits tells whether
it was a tie.
"""

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import gguf
import pytest
import torch
import typer
from rich.console import Console
from rich.table import Table

from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import read_prompts
from specctl.drafters.pool import load_drafter
from specctl.recipe import DataRecipe, DraftingRecipe
from tests.benchmarks.comparison import answer, started
from tests.toys.decoding import decode

THEIRS = str(Path(__file__).with_name("llamacpp_theirs.py"))
TIE = 0.5  # a smaller gap between two bf16 logits decides nothing


@dataclass
class Side:
    """Texts and times of one contender, in seconds of decoding and of reading prompts."""

    texts: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def as_bf16(source: Path, to: Path) -> None:
    """Write the file's weights dequantized to bf16; norms stay fp32, as llama.cpp requires."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, str(reader.fields["general.architecture"].contents()))
    for name, found in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = found.types[-1] if found.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, found.contents(), found.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        wide = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.F32 if wide.ndim == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, gguf.quantize(wide, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Theirs:
    """llama.cpp with one file, in a separate process."""

    def __init__(self, stack: ExitStack, python: Path, model: Path, threads: int, ngram: str = ""):
        self.process = stack.enter_context(started([str(python), "-I", THEIRS]))
        self.say({"model": str(model.resolve()), "threads": threads, "ngram": ngram})
        self.version = answer(self.process)["version"]

    def say(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def decode(self, side: Side, prompt: list[int], count: int) -> list[int]:
        self.say({"prompt": prompt, "n_predict": count})
        told = answer(self.process)
        took = told["timings"]
        side.tokens += took["predicted_n"] - 1  # the first token comes with the prompt
        side.seconds += took["predicted_ms"] / 1e3
        side.prompt_tokens += took["prompt_n"]
        side.prompt_seconds += took["prompt_ms"] / 1e3
        return told["tokens"]


class Ours:
    """One of our drafters, or plain decoding."""

    def __init__(self, target: Target, drafter: str | None):
        self.target = target
        self.drafter = None if drafter is None else load_drafter(drafter, target, DraftingRecipe())

    def decode(self, side: Side, prompt: list[int], count: int) -> list[int]:
        start = time.perf_counter()
        (done,) = decode(self.target, [prompt], sampling=GREEDY, max_new_tokens=count, seeds=[0], drafter=self.drafter)
        side.tokens += done.decoded_tokens
        side.seconds += done.decode_s
        side.prompt_tokens += len(prompt)
        side.prompt_seconds += time.perf_counter() - start - done.decode_s
        return done.output_ids


def _loaded(target: Path, as_stored: str) -> Target:
    """Load the target with its weights as stored, or dequantized to bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECCTL_GGUF", as_stored)
        return load_target(str(target), device="cpu", dtype="bf16")


def gap(target: Target, ids: list[int]) -> float:
    """Return the gap between our two largest logits after `ids`."""
    with torch.inference_mode():
        cache = target.new_cache(1, len(ids) + 1)
        logits = target.prefill([ids], cache)[0][0].float()
    first, second = logits.topk(2).values.tolist()
    return first - second


def main(
    python: Annotated[Path, typer.Option(help="An interpreter that has xllamacpp.")],
    target: Annotated[Path, typer.Option(help="A GGUF file of one part.")],
    prompts: Annotated[Path, typer.Option(help="A prompts file, as of `specctl eval --prompts`.")],
    drafter: Annotated[list[str], typer.Option(help="As of `specctl eval --drafter`.")] = [],  # noqa: B006
    ngram: Annotated[list[str], typer.Option(help="llama.cpp's n-gram drafts: simple, mod, map_k.")] = ["simple"],  # noqa: B006
    limit: Annotated[int, typer.Option()] = 16,
    max_new_tokens: Annotated[int, typer.Option()] = 128,
    threads: Annotated[int, typer.Option(help="0: one per core.")] = 0,
) -> None:
    """Time llama.cpp and specctl on the same weights and prompts, in turns."""
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    data = DataRecipe(domain=["prompts"], prompts=str(prompts), limit=limit)
    found = read_prompts(data, "prompts", sample=True)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        wide = Path(place) / "bf16.gguf"
        as_bf16(target, wide)
        mine, in_bf16 = (_loaded(target, as_stored) for as_stored in ("quantized", "dequantized"))
        contenders: dict[str, Theirs | Ours] = {
            "llama.cpp, bf16": Theirs(stack, python, wide, threads),
            **{f"llama.cpp, bf16, n-gram {name}": Theirs(stack, python, wide, threads, name) for name in ngram},
            "llama.cpp, the file": Theirs(stack, python, target, threads),
            "specctl, bf16": Ours(in_bf16, None),
            "specctl, the file": Ours(mine, None),
            **{f"specctl, the file, {name}": Ours(mine, name) for name in drafter},
        }
        sides = {name: Side() for name in contenders}
        for index, prompt in enumerate(found):
            ids = mine.render(prompt.messages)
            for name, contender in contenders.items():
                tokens = contender.decode(Side() if index == 0 else sides[name], ids, max_new_tokens)
                while tokens and tokens[-1] in mine.eos_ids:  # llama.cpp omits them
                    tokens = tokens[:-1]
                sides[name].texts.append([*ids, *tokens])
    show(sides, mine, [len(mine.render(prompt.messages)) for prompt in found], threads)


def show(sides: dict[str, Side], target: Target, starts: list[int], threads: int) -> None:
    """Print the table. Its last column counts the texts that differ from llama.cpp's in bf16."""
    reference = sides["llama.cpp, bf16"]
    table = Table(
        *("", "tokens/s", "× llama.cpp, bf16", "× llama.cpp, the file", "prompt tokens/s", "texts that differ"),
        title=f"{len(starts)} prompts, the first of which warms up; {threads} threads; greedy",
    )
    file = sides["llama.cpp, the file"]
    for name, side in sides.items():
        differ = []
        for ours, theirs, start in zip(side.texts, reference.texts, starts, strict=True):
            if ours != theirs:
                same = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) > 1), None)
                at = min(len(ours), len(theirs)) if same is None else same
                differ.append((at - start, gap(target, theirs[:at])))
        ties = sum(size <= TIE for _, size in differ)
        said = f"{len(differ)}, of which {ties} at a gap of at most {TIE}" if differ else "0"
        rates = f"{side.rate:.1f}", f"{side.rate / reference.rate:.2f}", f"{side.rate / file.rate:.2f}"
        table.add_row(name, *rates, f"{side.prompt_tokens / side.prompt_seconds:.0f}", said)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
