"""Rendering of conversations to prompt ids with a model's chat template, in a sandboxed worker process.

A template is a program that comes with the model. Its sandbox blocks files and Python's internals, but not loops of
99,999² steps or strings of 10 GB, some of them in C code that no signal interrupts. It therefore runs in a separate
process with limits on time and memory. That process is forked once, at the first conversation. It uses only the
tokenizer: no tensor, no device, no file. It closes all files and connections inherited from its parent, so that their
other ends notice when the parent exits.
"""

import gc
import json
import os
import re
import resource
import signal
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from specctl.decoding.models.loading import builtin_path, is_gguf
from specctl.errors import ChatTemplateError, CheckpointError
from specctl.progress import STOPPING, interrupts

SECONDS = 4  # CPU seconds for one conversation, and one more for each MiB: published templates take milliseconds
MEMORY = 2 << 30  # bytes beyond the initial size of the process
POLL_S = 0.2  # seconds between two checks for SIGTERM
LONGEST_REASON = 300  # characters
PROBES = ("first part", "second part")
PRINTED = re.compile(r"""['"]text['"]\s*:""")  # a list that was printed, and not gone through


class Renderer:
    """Handle of the worker process, which renders conversations with its copy of the tokenizer and template, made by
    the fork."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.template = tokenizer, tokenizer.chat_template
        self._owner = os.getpid()
        self._channel, theirs = Pipe()
        self._child = os.fork()
        if self._child == 0:
            self._channel.close()
            _serve(tokenizer, theirs)
        theirs.close()
        self._stop = weakref.finalize(self, _stop, self._child, self._channel, self._owner)

    def serves(self, tokenizer: Any) -> bool:
        """Whether the worker can be used from this process, for `tokenizer` with its current template."""
        same = self.tokenizer is tokenizer and self.template == tokenizer.chat_template
        return same and self._stop.alive and self._owner == os.getpid()

    def __call__(self, name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Render a conversation for target `name` to prompt ids. `options` are the template's arguments, with `tools`.

        Text parts of a message reach a template as a list if it goes through lists, otherwise as one text.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails on it.
            CheckpointError: the template exceeds its time or memory.
            Interrupted: a signal arrived meanwhile.
        """
        request = json.dumps([messages, options]).encode()
        where = f"target {name}: {template_file(name)}: the chat template"
        try:
            self._channel.send_bytes(request)
            while not self._channel.poll(POLL_S):
                interrupts.check()
            answer = json.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._stop.detach()  # the process id may soon be reused
            self._channel.close()
            fate = _fate(self._child, seconds_for(request))
            raise CheckpointError(f"{where} {fate} on one conversation", "fix the template") from error
        except BaseException:
            self._stop()  # the worker may still be answering; the next request would get that answer
            raise
        if isinstance(answer, list):
            if not answer:
                raise ChatTemplateError(f"{where} renders a conversation to no tokens", "fix the template")
            return answer
        raise ChatTemplateError(
            f"{where} rejects a conversation: {answer}", "fix the template, or pass the arguments that it asks for"
        )


def template_file(name: str) -> str:
    """Path of a model's chat template, for messages."""
    if is_gguf(name):
        return "tokenizer.chat_template"
    root = builtin_path() if name == "builtin" else Path(name).expanduser()
    files = (root / file for file in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    return next((str(file) for file in files if file.is_file()), "tokenizer_config.json")


def _serve(tokenizer: Any, channel: Connection) -> NoReturn:
    """Worker process: answer each request, until the parent is gone."""
    try:
        gc.freeze()  # otherwise its first collection would write to, and so copy, every shared page
        for number in (signal.SIGINT, *STOPPING):
            signal.signal(number, signal.SIG_IGN)  # left to the parent
        with suppress(OSError):  # a system without /dev/fd
            for descriptor in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, channel.fileno()}:
                with suppress(OSError):  # the descriptor of the listing itself
                    os.close(descriptor)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # fork does not copy the tokenizer's threads
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, _size() + MEMORY)
        while True:
            request = channel.recv_bytes()
            messages, options = json.loads(request)
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = 1 + seconds_for(request)  # it began within a second
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds)
            channel.send_bytes(json.dumps(_answer(tokenizer, messages, options)).encode())
    finally:
        os._exit(0)


def _answer(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | str:
    """Prompt ids, or the reason why there are none."""
    if any(isinstance(one.get("content"), list) for one in messages) and not _takes_lists(tokenizer, options):
        messages = [_with_joined_text(one) for one in messages]
    answer = _rendered(tokenizer, messages, options)
    if isinstance(answer, str) and any(one.get("tool_calls") for one in messages):
        # Templates expect an object as arguments and may expect no content. Some expect strings for both.
        for form in (_with_content, _with_string_arguments):
            messages = [form(one) if one.get("tool_calls") else one for one in messages]
            other = _rendered(tokenizer, messages, options)
            if not isinstance(other, str):
                return other
    return answer


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | str:
    try:
        encoded = tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True} | options, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]
    except MemoryError:  # do not continue in a process that is out of memory
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        # A template refuses a conversation with `raise_exception("why")`, which is a plain TemplateError.
        return reason if type(error) is TemplateError and reason else f"{type(error).__name__}: {reason}".rstrip(": ")


def _takes_lists(tokenizer: Any, options: dict[str, Any]) -> bool:
    """Whether the template goes through lists of text parts. Others fail on a list, or print it as Python's code."""
    probe = [{"role": "user", "content": [{"type": "text", "text": text} for text in PROBES]}]
    try:
        shown = tokenizer.apply_chat_template(probe, **{"add_generation_prompt": True} | options, tokenize=False)
    except MemoryError:
        raise
    except Exception:
        return False
    return all(text in shown for text in PROBES) and not PRINTED.search(shown)


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": message.get("content") or ""}


def _with_string_arguments(message: dict[str, Any]) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    strings = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    calls = [
        call | {"function": function | {"arguments": text}}
        for call, function, text in zip(message["tool_calls"], functions, strings, strict=True)
    ]
    return message | {"tool_calls": calls}


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def seconds_for(request: bytes) -> int:
    """CPU seconds that a template may take for a request."""
    return SECONDS + (len(request) >> 20)


def _fate(child: int, seconds: int) -> str:
    """Why the worker process ended, as text. `seconds`: its limit."""
    with suppress(ChildProcessError):
        _, status = os.waitpid(child, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU:
            return f"takes more than {seconds} s"
        if number == signal.SIGKILL:
            return f"takes more than {MEMORY >> 30} GiB of memory"
    return "crashes its process"


def _stop(child: int, channel: Connection, owner: int) -> None:
    if os.getpid() != owner:  # this is a forked copy of the owner
        return
    channel.close()
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process, if the system permits it."""
    _, hard = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _size() -> int:
    """Bytes of this process' address space; 2⁶⁰ on systems that do not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 60
