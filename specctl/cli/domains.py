"""`specctl domains`: list and show the domains with prompts."""

from typing import Annotated, Any

import typer

from specctl.cli.command import command, command_group
from specctl.cli.output import cell, output, table

GROUP = command_group("domains", "ls | show: domains with prompts.")
Name = Annotated[str, typer.Argument(help="A name from `specctl domains ls`.")]
Samples = Annotated[int, typer.Option("--samples", min=0, help="Generated prompts to show.")]
LABELS = {"licence": "license"}  # the key of the document stays
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the generator.")]


@command("ls", group=GROUP)
def ls() -> None:
    """List the domains."""
    from specctl.data_prep import DOMAINS

    rows = [
        {"name": name, "prompts": domain.description, "public": domain.public.id, "licence": domain.public.licence}
        for name, domain in DOMAINS.items()
    ]
    output.result({"domains": rows}, _listing, brief="\n".join(DOMAINS))


@command("show", group=GROUP)
def show(name: Name, samples: Samples = 3, seed: Seed = 0) -> None:
    """Show a domain: its public data set, prompt layout and license, and some generated prompts."""
    from dataclasses import asdict

    from specctl import data_prep

    domain = data_prep.get(name)
    document = {
        "name": domain.name,
        "description": domain.description,
        "public": asdict(domain.public),
        "samples": list(domain.generate(samples, seed)),
    }
    output.result(document, _card, brief="\n\n".join(document["samples"]))


def _listing(document: dict[str, Any]) -> Any:
    rows = [list(row.values()) for row in document["domains"]]
    return table("domain", "prompts", "public data set", "license", rows=rows)


def _words(value: Any) -> str:
    """Render a field of a public data set; a mapping of names, such as the split of each part, as `name = value`."""
    if isinstance(value, dict):
        return cell(", ".join(part if part == name else f"{name} = {part}" for name, part in value.items()))
    return cell(value)


def _card(document: dict[str, Any]) -> str:
    public = "\n".join(
        f"  {LABELS.get(key, key)}: {_words(value)}" for key, value in document["public"].items() if value
    )
    samples = "\n\n".join(cell(sample) for sample in document["samples"])
    heading = f"{document['name']}: {cell(document['description'])}"
    generated = f"\n\nprompts from the generator\n\n{samples}" if samples else ""
    return f"{heading}\n\npublic data set\n{public}{generated}"
