"""Fixtures for the training tests: short prompts answered by the built-in target, as a distilled directory."""

import pytest

from specctl.distillation.generate import distill
from specctl.recipe import DataRecipe, DistillRecipe, SamplingRecipe, TargetRecipe
from specctl.runs import Run


@pytest.fixture(scope="session")
def distilled(tmp_path_factory, target):
    place = tmp_path_factory.mktemp("distilled")
    recipe = DistillRecipe(
        target=TargetRecipe(dtype="fp32", device="cpu"),
        data=DataRecipe(domain=["biochem"], limit=40),
        sampling=SamplingRecipe(max_new_tokens=24),
        batch_size=40,
        output_dir=place / "biochem",
    )
    (place / "run").mkdir()
    distill(recipe, Run(place / "run"), target=target)
    return place / "biochem"
