"""`specctl export --push` uploads the files and a model card, here to a local hub."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml

from specctl.decoding.models.loading import builtin_path
from specctl.drafters.card import model_card
from tests.measuring.streams import write_head

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


class Hub(ThreadingHTTPServer):
    """The upload API of the Hugging Face hub: weights through LFS, other files in the commit."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files, self.stored, self.created, self.status = {}, {}, [], 200


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def _answer(self, document, status=200):
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        body, hub = self._body(), self.server
        if hub.status != 200:
            return self._answer({"error": "not allowed here"}, hub.status)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self._answer({"url": f"{hub.url}/team/head", "name": "team/head"})
        if self.path == "/api/validate-yaml":
            return self._answer({"warnings": [], "errors": []})
        if self.path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            files = [{"path": name, "uploadMode": mode} for name, mode in zip(names, modes, strict=True)]
            return self._answer({"files": [one | {"shouldIgnore": False} for one in files]})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{hub.url}/lfs/{one['oid']}", "header": {}}} for one in objects]
            answers = [one | {"actions": action} for one, action in zip(objects, actions, strict=True)]
            return self._answer({"transfer": "basic", "objects": answers})
        if self.path.endswith("/commit/main"):
            for line in body.splitlines():
                row = json.loads(line)
                value = row["value"]
                if row["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif row["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.stored[value["oid"]]
            commit = {"commitUrl": f"{hub.url}/team/head/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
            return self._answer({"success": True, **commit})
        return self._answer({"error": f"unknown path {self.path}"}, 404)

    def do_GET(self):
        self._answer({"id": "team/head", "siblings": [], "sha": "0" * 40})

    def do_PUT(self):
        content = self._body()
        assert hashlib.sha256(content).hexdigest() == self.path.removeprefix("/lfs/")
        self.server.stored[self.path.removeprefix("/lfs/")] = content
        self._answer({})


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for module in ("constants", "hf_api.constants"):
            monkeypatch.setattr(f"huggingface_hub.{module}.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def head(tmp_path_factory, target):
    return write_head(tmp_path_factory.mktemp("heads") / "sql-eagle3", target, "eagle3", 0)


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_the_exported_files_are_uploaded(specctl, hub, head, tmp_path, to):
    """With the weights, and without paths of this machine."""
    out = tmp_path / "out"
    done = specctl.ok(
        "export", str(head), "--to", to, "--push", "team/head", "--private", "--output-dir", str(out), "--json"
    )
    assert done.json["pushed"] == f"{hub.url}/team/head"
    assert [one["name"] for one in hub.created] == ["head"] and hub.created[0]["organization"] == "team"
    assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
    assert hub.files == {name: (out / name).read_bytes() for name in ("README.md", "config.json", "model.safetensors")}
    card = hub.files["README.md"].decode()
    assert "team/head" in card
    for text in (card, hub.files["config.json"].decode()):
        assert str(tmp_path) not in text and str(builtin_path()) not in text
    if to == "vllm":
        assert "vllm serve builtin " in card
        assert '"model": "team/head"' in card, "the serving command names the repository"


@pytest.mark.parametrize(("status", "says"), [(403, "answered 403"), (500, "answered 500"), (None, "Connect")])
def test_a_failed_upload_keeps_the_local_files(specctl, hub, head, tmp_path, status, says):
    if status is None:
        hub.shutdown()
        hub.server_close()
    else:
        hub.status = status
    done = specctl("export", str(head), "--push", "team/head", "--output-dir", str(tmp_path / "out"))
    assert done.code == 1 and says in done.err and str(tmp_path / "out") in done.err
    assert (tmp_path / "out/model.safetensors").is_file()
    assert ("hf auth login" in done.err) == (status == 403)


@pytest.mark.parametrize("name", ["head", "a/b/c", "../x", "team/", "te am/x"])
def test_an_invalid_repository_name_is_refused_before_writing(specctl, head, tmp_path, name):
    done = specctl("export", str(head), "--push", name, "--output-dir", str(tmp_path / "out"))
    assert done.code == 2 and "OWNER/NAME" in done.err
    assert not (tmp_path / "out").exists()


def test_private_without_push_is_refused(specctl, head):
    done = specctl("export", str(head), "--private")
    assert done.code == 2 and "push" in done.err


def test_a_model_card_has_valid_metadata():
    """The hub refuses a sentence as `license` and a local path as `base_model`."""
    config = {"family": "eagle3", "target": {"name": "Qwen/Qwen3-8B", "hidden_size": 4096}}
    info = {"domain": ["sql"], "mat": {"held-out sql": 3.456}, "licence": "same as the target", "prompts": {"x": 1}}
    card = model_card("sql-eagle3", config, info, "vllm", ["vllm serve Qwen/Qwen3-8B"])
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "Qwen/Qwen3-8B" and "license" not in front
    assert front["tags"] == ["speculative-decoding", "eagle3", "vllm", "specctl"]
    assert "| held-out sql | 3.46 |" in card and "vllm serve" in card and '"x"' not in card
    local = model_card("a", config | {"target": {"name": "/home/me/models/m.gguf"}}, {})
    assert "base_model" not in yaml.safe_load(local.split("---\n")[1])
    assert "/home" not in local and "`m.gguf`" in local
