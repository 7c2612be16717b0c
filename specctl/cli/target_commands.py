"""Commands that work with a target: all commands, or only the ones in which an engine runs the target."""

from dataclasses import dataclass

WITH_ENGINES = {
    "distill --server": "",
    "distill --from-log": "",
    "eval-server": "",
    "train-drafter --features-from": "mat is estimated, not measured",
    "train-drafter features.mode=cached": "mat is not measured",
    "train-drafter --arch retrieval": "mat is not measured",
    "export": "",
    "import": "the head is not tried",
    "serve --server": "",
}
"""Commands in which specctl never runs the target's layers, and the measurement that is left out without the layers."""
OWN_FORWARD = (
    *("generate", "distill", "eval", "select", "online", "learn-from-server", "serve", "bench", "train-drafter"),
    *("record", "train-router", "reason"),
)
"""Commands, without the options above, in which specctl itself runs the target."""


@dataclass(frozen=True)
class CommandUse:
    """A command, whether it works with a target, and the limit that the target sets (empty: none)."""

    command: str
    works: bool
    without: str = ""


def commands_of(only_engines: bool) -> list[CommandUse]:
    """All commands that read a target. `only_engines`: specctl cannot run the target itself."""
    served = [CommandUse(name, True, left_out if only_engines else "") for name, left_out in WITH_ENGINES.items()]
    return served + [CommandUse(name, not only_engines) for name in OWN_FORWARD]
