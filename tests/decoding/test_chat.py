"""Chat templates are programs by third parties: any failure becomes a one-line error that names their file."""

import os
import select

import pytest

from specctl.decoding.models import chat
from specctl.decoding.models.loading import builtin_path, load_tokenizer
from specctl.errors import ChatTemplateError, CheckpointError, Interrupted
from specctl.progress import interrupts

ONE = [{"role": "user", "content": "How many pets?"}]
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin")


@pytest.fixture
def render(tokenizer, monkeypatch):
    """`render(template)` returns the ids of one conversation. The template None stands for the model's own."""
    own = tokenizer.chat_template

    def ask(template=None, messages=ONE, **options):
        monkeypatch.setattr(tokenizer, "chat_template", own if template is None else template)
        return chat.Renderer(tokenizer)("builtin", messages, options)

    return ask


def test_rendered_ids_equal_the_tokenizers(render, tokenizer):
    for text in ("hi", "", "Ünïcödé 🦜", "x " * 3000, "lone \ud800"):
        messages = [{"role": "system", "content": "short"}, {"role": "user", "content": text}]
        try:
            wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception:
            with pytest.raises(ChatTemplateError):
                render(messages=messages)
        else:
            assert render(messages=messages) == list(wanted)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ nobody.knows }}", "UndefinedError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('x\\n' * 9999) }}", "x x x"),
        ("", "to no tokens"),
    ],
)
def test_an_error_in_a_template_is_one_line(render, template, says):
    with pytest.raises(ChatTemplateError) as error:
        render(template)
    message = error.value.message
    assert says in message and str(builtin_path() / "chat_template.jinja") in message and error.value.exit_code == 3
    assert "\n" not in message and len(message) < 700


def test_an_endless_template_is_stopped(render, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: the chat template takes more than 1 s"):
        render(FOR_EVER, [{"role": "user", "content": "a" * 2**20}])


@pytest.mark.parametrize("template", ["{{ 'a' * 10 ** 12 }}", "{{ messages | tojson(indent=99999999) }}"])
def test_a_template_that_fills_the_memory_is_stopped(render, monkeypatch, template):
    monkeypatch.setattr(chat, "MEMORY", 1 << 28)
    with pytest.raises(CheckpointError, match=r"takes more than \d GiB of memory"):
        render(template, ONE * 50)


def test_a_signal_interrupts_a_template(render, monkeypatch):
    monkeypatch.setattr(interrupts, "_signal", 15)
    with pytest.raises(Interrupted):
        render(FOR_EVER)


def test_a_target_renders_again_after_failures(target, monkeypatch):
    wanted = target.render(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(target.tokenizer, "chat_template", "{{ raise_exception(messages[0].content) }}")
        for text in ("one", "two"):
            with pytest.raises(ChatTemplateError, match=f"rejects a conversation: {text}"):
                target.render([{"role": "user", "content": text}])
        patch.setattr(target.tokenizer, "chat_template", "{{ 'a' * 10 ** 12 }}")
        with pytest.raises(CheckpointError):
            target.render(ONE)
    assert target.render(ONE) == wanted


def test_an_ended_process_is_not_used_or_killed_again(tokenizer, monkeypatch):
    """By then its id may belong to another process."""
    monkeypatch.setattr(chat, "SECONDS", 0)
    monkeypatch.setattr(tokenizer, "chat_template", "{% if messages[0].content == 'all' %}" + FOR_EVER + "{% endif %}a")
    renderer = chat.Renderer(tokenizer)
    with pytest.raises(CheckpointError):
        renderer("builtin", [{"role": "user", "content": "all"}], {})
    monkeypatch.setattr(os, "kill", None)
    assert not renderer.serves(tokenizer)
    del renderer


def test_the_renderers_process_closes_inherited_files(tokenizer):
    """If it kept a lock or a connection open, other programs would not notice the end of its parent."""
    reading, writing = os.pipe()
    renderer = chat.Renderer(tokenizer)
    assert renderer("builtin", ONE, {})
    os.close(writing)
    assert select.select([reading], [], [], 1.0)[0] and os.read(reading, 1) == b""
    os.close(reading)


def test_the_renderers_process_ends_with_the_renderer(tokenizer):
    renderer = chat.Renderer(tokenizer)
    child = renderer._child
    os.kill(child, 0)
    del renderer
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
