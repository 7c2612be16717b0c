"""Exported heads in the model of the `speculators` package itself."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from specctl.commands import export as exporting
from specctl.drafters import checkpoint
from specctl.recipe import ExportRecipe
from tests.drafters.variants import TRAINED, VARIANTS
from tests.formats import consumers
from tests.formats.conftest import CUSTOM, DEFAULT, STEPS

PYTHON = os.environ.get("SPECCTL_SPECULATORS_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="SPECCTL_SPECULATORS_PYTHON names no interpreter with `speculators` installed")
@pytest.mark.parametrize(
    "options",
    [
        *({"taps": taps, "draft_vocab": size} for taps in (DEFAULT, CUSTOM) for size in (None, 700)),
        *({"draft_vocab": 700, **norms} for name, norms in VARIANTS.items() if "sliding_window" not in norms),
        {"draft_vocab": 700, **TRAINED, "sliding_window": 2048},
    ],
    ids=str,
)
def test_the_speculators_model_computes_our_logits(make, ours, model, text, tmp_path, options):
    """Without windows shorter than the text, because later steps of the package's training see k more tokens."""
    drafter, place = make("eagle3", **options), tmp_path / "out"
    exporting.export(ExportRecipe(drafter=drafter, to="speculators", output_dir=place))
    ids, committed = text
    hidden, embedding = consumers.states(model, ids)
    features = torch.cat([hidden[i] for i in options.get("taps", DEFAULT)], -1)
    given = {"features": features, "tokens": torch.tensor(ids[1:]), "embedding": embedding}
    torch.save({**given, "steps": STEPS, "row": committed - 2}, tmp_path / "given.pt")
    script = Path(__file__).with_name("speculators_model.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(place), str(tmp_path / "given.pt"), str(tmp_path / "result.pt")],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr
    logits = torch.load(tmp_path / "result.pt")
    found = checkpoint.load(drafter).tensors
    target_ids = found["d2t"] + torch.arange(len(found["d2t"]))
    expected = ours(drafter)[:, target_ids]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
