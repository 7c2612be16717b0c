"""A gateway in this process: its application for an ASGI client, or on a real socket."""

import asyncio
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.prefix_cache import PrefixCache
from specctl.drafters import pool
from specctl.gateway import server
from specctl.gateway.app import make_app
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.metrics import Meter
from specctl.gateway.own_engine import OwnEngine
from specctl.recipe import DraftingRecipe, LimitsRecipe, ServeRecipe

PATIENCE_S = 120


class Gateway:
    """The application of its own engine, with a client that needs no socket."""

    def __init__(self, engine, drafter, limits, key, waiting):
        self.meter = Meter("toy")
        self.meter.prefix_cache = engine.options.prefix_cache
        self.thread = EngineThread(engine, self.meter, drafter)
        self.backend = OwnEngine(self.thread, engine.target, "toy", ServeRecipe(waiting=waiting))
        self.backend.warm_up()
        self.thread.start()
        self.app = make_app(self.backend, limits, key)

    def client(self):
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://toy")

    def ask(self, path, *bodies, **options):
        """Send all bodies at once and return the responses."""

        async def work():
            async with self.client() as http:
                return await asyncio.gather(*[http.post(path, json=body, **options) for body in bodies])

        return asyncio.run(work())

    def metric(self, name, **labels):
        return self.meter.registry.get_sample_value(name, labels)


@pytest.fixture(scope="session")
def lookup(target):
    return pool.load_drafter("lookup", target, DraftingRecipe(depth=7))


@pytest.fixture
def make_gateway(target):
    """Return `make(controller)`, which gives a Gateway; its thread ends with the test."""
    made = []

    def make(controller=None, drafter="plain", slots=8, limits=None, key=None, waiting=256):
        options = EngineOptions(slots=slots, prefix_cache=PrefixCache(most_bytes=2**26))
        engine = Engine(target, controller or Fixed.of(None), options)
        made.append(Gateway(engine, drafter, limits or LimitsRecipe(), key, waiting))
        return made[-1]

    yield make
    for gateway in made:
        gateway.thread.stop()


@contextmanager
def served(app):
    """Serve an application on a loopback socket and yield its address."""
    with server.listening("127.0.0.1:0") as (place, address):
        http = server.make_server(app)
        thread = threading.Thread(target=http.run, args=([place],), daemon=True)
        thread.start()
        wait_for(lambda: http.started)
        try:
            yield address
        finally:
            http.should_exit = True
            thread.join(PATIENCE_S)


def wait_for(condition):
    """Wait until a condition holds, or fail."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.005)


def heard(capsys, words):
    """Wait until stderr has these words. Return the whole text of stderr."""
    said = []
    wait_for(lambda: said.append(capsys.readouterr().err) or words in "".join(said))
    return "".join(said)


def chat(text="List the names of all students.", **fields):
    """Return the body of a chat request. Its seed is fixed, so that a test gets the same text in every run."""
    return {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 0, **fields}
