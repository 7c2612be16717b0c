"""Training documents for draft heads in tests: prompts with greedy answers."""

from specctl.decoding.sampling import GREEDY
from specctl.training.example import Example
from tests.toys.decoding import decode


def documents(target, prompts, lengths):
    """Return one example per entry of `lengths`, which gives its number of new tokens."""
    texts = [
        decode(target, [prompt], sampling=GREEDY, max_new_tokens=new, seeds=[0])[0]
        for prompt, new in zip(prompts, lengths, strict=False)
    ]
    return [Example(i, str(i), text.prompt_ids + text.output_ids, len(text.prompt_ids)) for i, text in enumerate(texts)]
