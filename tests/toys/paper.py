"""A format with its own file and its own row in the table: the contents of our directory under other names."""

from specctl.formats.head import Files, Head, Serving


def claims(found):
    return "paper" in found.config


def read(found, facts):
    kept = found.config["paper"]
    tensors = {name.removeprefix("paper."): tensor for name, tensor in found.tensors.items()}
    return Head(kept["family"], kept["architecture"], tensors, (f"made for {kept['made_for']}",))


def write(head, facts, tokens, to):
    kept = {"family": head.family, "architecture": head.architecture, "made_for": facts.name}
    tensors = {f"paper.{name}": tensor for name, tensor in head.tensors.items()}
    return Files({"paper": kept, "to": to, "tokens": tokens}, tensors)


def serving(head, to, use):
    return Serving([f"{to} {use.place} {use.facts.name} {use.tokens}"], [f"{to} is made of paper"])
