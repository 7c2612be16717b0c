"""Files of prompts, perturbed: python -m tests.benchmarks.perturbed KIND STRENGTH OUT DOMAIN=FILE …

OUT/DOMAIN.jsonl has the prompts of each file in their order, changed by `specctl.lab.routing.perturb`; what is
foreign to a prompt are those of the other domains. `specctl select --prompts 'OUT/{domain}.jsonl'` decodes them.
"""

import json
import sys
from pathlib import Path
from typing import get_args

from specctl.lab.routing.options import Perturbation
from specctl.lab.routing.training import RouterExample, perturb_all


def main() -> None:
    kind, strength, out, *files = sys.argv[1:]
    if kind not in get_args(Perturbation):
        raise SystemExit(f"no perturbation {kind!r}: there are {', '.join(get_args(Perturbation))}")
    examples = []
    for named in files:
        domain, path = named.split("=", 1)
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        examples += [RouterExample(json.loads(line)["prompt"], domain, arm=0) for line in lines]
    changed = perturb_all(examples, kind, float(strength), seed=0)
    written: dict[str, list[str]] = {}
    for example, text in zip(examples, changed, strict=True):
        written.setdefault(example.domain, []).append(json.dumps({"prompt": text}) + "\n")
    Path(out).mkdir(parents=True, exist_ok=True)
    for domain, lines in written.items():
        Path(out, f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
