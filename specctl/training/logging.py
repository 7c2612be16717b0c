"""Trackers that show the progress of learning to a user (`--log tensorboard|wandb|trackio`), in addition to metrics."""

import importlib
from typing import Any

from specctl.errors import UsageError
from specctl.recipe import CommandRecipe
from specctl.runs import Run


class Trackers:
    """Sends scalar metrics to all requested trackers."""

    def __init__(self, names: list[Any], run: Run, recipe: CommandRecipe):
        self.writer: Any = None
        self.services: list[Any] = []
        for name in names:
            if name == "tensorboard":
                module = _import("torch.utils.tensorboard", "tensorboard")
                self.writer = module.SummaryWriter(str(run.dir / "tensorboard"))
            else:  # wandb and trackio share their interface
                service = _import(name, name)
                service.init(project="specctl", name=run.dir.name, config=recipe.model_dump(mode="json"))
                self.services.append(service)

    def log(self, step: int, **values: float) -> None:
        if self.writer is not None:
            for key, value in values.items():
                self.writer.add_scalar(key, value, step)
        for service in self.services:
            service.log(values, step=step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        for service in self.services:
            service.finish()


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"--log {package}: {package} is not installed", f"pip install {package}") from error
