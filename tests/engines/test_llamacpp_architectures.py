"""llama.cpp and specctl compute the same logits from a GGUF file of every architecture.

Catches a reading of the file on which this package's own writer of test files and its reader agree, but llama.cpp does
not. Random models have near ties, so logarithms of probabilities are compared, and no texts.
"""

from contextlib import ExitStack

import pytest
import torch

from specctl.decoding.models.loading import load_model
from tests.benchmarks.comparison import answer
from tests.benchmarks.llamacpp import Theirs
from tests.conftest import write_tiny
from tests.decoding.test_gguf import CPU
from tests.decoding.test_gguf_architectures import IDS, LONGROPE, MODELS, PLAIN
from tests.engines.test_llamacpp_server import NO_LLAMACPP, PYTHON
from tests.toys.gguf import write

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_LLAMACPP)]

CHANGED = {
    "gpt-oss": {"rope_parameters": PLAIN},  # llama.cpp rounds the limits of YaRN's ramp
    "phi3-longrope": {  # it takes the long factors if its cache is longer than the original context
        "max_position_embeddings": 2**14,
        "original_max_position_embeddings": 2**13,
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": 2**13},
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_equal_those_of_llama_cpp(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kind, sizes = MODELS[name]
    write(write_tiny(tmp_path / "hf", kind, sizes | CHANGED.get(name, {})), tmp_path / "m.gguf")
    ids = IDS[:40] if name == "phi3-window" else IDS  # llama.cpp ignores the windows of Phi-3
    with torch.no_grad():
        model = load_model(str(tmp_path / "m.gguf"), device=CPU, dtype=torch.float32)
        ours = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    with ExitStack() as stack:
        theirs = Theirs(stack, PYTHON, tmp_path / "m.gguf", threads=1)
        theirs.say({"prompt": ids, "n_predict": 1, "n_probs": 5})
        found = answer(theirs.process)["completion_probabilities"][0]["top_logprobs"]
    for token in found:  # llama.cpp stores keys and values in fp16
        assert ours[token["id"]].item() == pytest.approx(token["logprob"], abs=0.02)
