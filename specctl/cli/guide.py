"""`specctl guide`: the user guides in `specctl/guides/`, one page per task, shown in the terminal."""

from __future__ import annotations

import sys
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.command import command
from specctl.cli.output import output, table
from specctl.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

TOPICS = (
    *("data", "targets", "drafters", "choosing", "learning", "gateway", "serving", "engines"),
    *("clusters", "gpu", "lossless", "results", "troubleshooting"),
)
"""Names of the guides, in the order of the list: each is the name of a file without `.md`."""
SEARCHED = {
    **dict.fromkeys(("distill", "domains", "prompts", "logs", "filters"), "data"),
    **dict.fromkeys(("doctor", "models", "gguf", "huggingface"), "targets"),
    **dict.fromkeys(("train-drafter", "eagle3", "lora", "specialists", "hybrids", "retrieval"), "drafters"),
    **dict.fromkeys(("select", "policies", "pools", "record", "replay", "train-router"), "choosing"),
    **dict.fromkeys(("online", "rl", "grpo", "trl"), "learning"),
    **dict.fromkeys(("serve", "openai", "metrics"), "gateway"),
    **dict.fromkeys(("server", "proxy", "eval-server", "learn-from-server"), "serving"),
    **dict.fromkeys(("export", "import", "vllm", "sglang", "llama.cpp", "llama-server"), "engines"),
    **dict.fromkeys(("slurm", "deepspeed", "torchrun", "resume", "scripts"), "clusters"),
    **dict.fromkeys(("cuda", "graphs", "kernels", "cache"), "gpu"),
    **dict.fromkeys(("exact", "ties", "reason", "reasoning"), "lossless"),
    **dict.fromkeys(("eval", "bench", "report", "tables"), "results"),
    **dict.fromkeys(("errors", "memory", "offline"), "troubleshooting"),
}
"""Words that a user may type instead of a topic → the topic that the error message suggests."""
Topic = Annotated[str | None, typer.Argument(help="A guide from the list; without one the list is shown.")]


@command("guide", "specctl guide drafters")
def guide(topic: Topic = None) -> None:
    """Show a user guide, or the list of guides."""
    if topic is None:
        rows = [{"topic": name, "about": about(text(name))} for name in TOPICS]
        return output.result({"guides": rows}, _listing, brief="\n".join(TOPICS))
    if topic not in TOPICS:
        near = did_you_mean(topic, {**{name: name for name in TOPICS}, **SEARCHED})
        raise UsageError(f"no guide {topic!r}", hint=near or f"guides: {', '.join(TOPICS)}")
    page = text(topic)
    output.result({"topic": topic, "text": page}, _page, brief=page.rstrip())


def text(topic: str) -> str:
    return (resources.files("specctl") / "guides" / f"{topic}.md").read_text(encoding="utf-8")


def about(page: str) -> str:
    """The contents of a guide in one line: its heading after the colon."""
    return page.partition("\n")[0].partition(": ")[2]


def _listing(document: dict[str, Any]) -> RenderableType:
    return table("topic", "about", rows=[[row["topic"], row["about"]] for row in document["guides"]])


def _page(document: dict[str, Any]) -> RenderableType:
    """Formatted Markdown on a terminal; elsewhere the text of the file, for `grep` and pagers."""
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        return Markdown(document["text"])
    from rich.text import Text

    return Text(document["text"].rstrip())
