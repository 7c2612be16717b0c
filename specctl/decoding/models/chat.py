"""Conversations as prompt ids, by the chat template of a model.

A template is a program that comes with the model. The sandbox it runs in keeps it from files and from Python's
internals, but not from loops of 99,999² steps or strings of 10 GB, some of them inside of C code that no signal
interrupts. So it runs in a process of its own, with limits on its time and memory. The process is forked once, at the
first conversation, and touches nothing but the tokenizer: no tensor, no device, no file. Of its parent's files and
connections it keeps none open: whoever waits for the parent's end sees it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from specctl.decoding.models.gguf_target import is_gguf
from specctl.decoding.models.loading import builtin_path
from specctl.errors import ChatTemplateError, CheckpointError
from specctl.progress import interrupts

SECONDS = 4  # of a CPU for one conversation: published templates take milliseconds
MEMORY = 2 << 30  # bytes beside those that the process begins with
POLL_S = 0.2  # between two looks at whether SIGTERM has come
LONGEST_REASON = 300  # characters


class Renderer:
    """The process that lays out conversations by a tokenizer and its template, both as they are when it begins."""

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
        """Whether it can be asked, from this process, on behalf of `tokenizer`."""
        same = self.tokenizer is tokenizer and self.template == tokenizer.chat_template
        return same and self._stop.alive and self._owner == os.getpid()

    def __call__(self, name: str, messages: list[dict[str, str]], options: dict[str, Any]) -> list[int]:
        """Prompt ids of a conversation with target `name`; `options` are the template's arguments.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails on it.
            CheckpointError: it takes more time or memory than it may.
            Interrupted: SIGTERM or SIGUSR1 came meanwhile.
        """
        request = json.dumps([messages, options]).encode()
        where = f"target {name}: {template_file(name)}: the chat template"
        try:
            self._channel.send_bytes(request)
            while not self._channel.poll(POLL_S):
                interrupts.check()
            answer = json.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._stop.detach()  # its number may soon be another process'
            self._channel.close()
            raise CheckpointError(f"{where} {_fate(self._child)} on one conversation", "mend the template") from error
        except BaseException:
            self._stop()  # it may be in the middle of an answer, which the next question would get
            raise
        if isinstance(answer, list):
            if not answer:
                raise ChatTemplateError(f"{where} makes no token of it", "mend it")
            return answer
        raise ChatTemplateError(f"{where} refuses it: {answer}", "mend it, or give it what it asks for")


def template_file(name: str) -> str:
    """The file that a model's chat template is in, for messages."""
    if is_gguf(name):
        return "tokenizer.chat_template"
    root = builtin_path() if name == "builtin" else Path(name).expanduser()
    files = (root / file for file in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    return next((str(file) for file in files if file.is_file()), "tokenizer_config.json")


def _serve(tokenizer: Any, channel: Connection) -> NoReturn:
    """The child: an answer to every question, until whoever asks is gone."""
    try:
        gc.freeze()  # or its first collection writes to, and so copies, every page that it shares
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the parent's business
        with suppress(OSError):  # a system without such a directory
            for descriptor in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, channel.fileno()}:
                with suppress(OSError):  # the listing's own
                    os.close(descriptor)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not come along
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, _size() + MEMORY)
        while True:
            messages, options = json.loads(channel.recv_bytes())
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + SECONDS)
            channel.send_bytes(json.dumps(_answer(tokenizer, messages, options)).encode())
    finally:
        os._exit(0)


def _answer(tokenizer: Any, messages: list[dict[str, str]], options: dict[str, Any]) -> list[int] | str:
    """Ids, or why there are none."""
    try:
        encoded = tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True} | options, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]
    except MemoryError:  # what is left of this process is not to be relied on
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    except Exception as error:  # whatever a program can raise
        said = " ".join(str(error).split())[:LONGEST_REASON]
        # A template says no by `raise_exception("why")`, which is a plain TemplateError.
        return said if type(error) is TemplateError and said else f"{type(error).__name__}: {said}".rstrip(": ")


def _fate(child: int) -> str:
    """The cause of the child's end, in words."""
    with suppress(ChildProcessError):
        _, status = os.waitpid(child, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU:
            return f"takes more than {SECONDS} s"
        if number == signal.SIGKILL:
            return f"takes more than {MEMORY >> 30} GiB of memory"
    return "breaks its process"


def _stop(child: int, channel: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a copy of the owner has a copy of this object
        return
    channel.close()
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process, where the system lets it."""
    _, hard = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _size() -> int:
    """Bytes of address space of this process; on systems that do not tell, as much as there can be."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 60
