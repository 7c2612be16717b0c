"""vLLM's paths for a tokenizer, as `lm_eval` asks for them with `tokenizer_backend=remote`."""

import asyncio

import pytest

MESSAGES = [{"role": "user", "content": "Count the users."}]
TEXTS = ["SELECT name FROM users", "", " é\n\t€ 😀", "<|end|>"]
REFUSED = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"prompt": "x" * (2**20 + 1)}, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "gpt-4"}, "model"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
    ("/tokenize", {"prompt": "x", "truncate": 3}, "truncate"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens.0"),
    ("/detokenize", {"tokens": "SELECT"}, "tokens"),
    ("/detokenize", {}, "tokens"),
]


def get(gateway, path):
    async def work():
        async with gateway.client() as http:
            return await http.get(path)

    return asyncio.run(work())


@pytest.fixture
def gateway(make_gateway):
    return make_gateway()


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_tokens_and_texts_again(target, gateway, text):
    (answer,) = gateway.ask("/tokenize", {"prompt": text, "add_special_tokens": False})
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    wanted = {"count": len(ids), "max_model_len": target.context_length, "tokens": ids, "token_strs": None}
    assert (answer.status_code, answer.json()) == (200, wanted)
    (back,) = gateway.ask("/detokenize", {"tokens": ids})
    assert back.json() == {"prompt": target.tokenizer.decode(ids)}


def test_names_of_tokens_and_conversations(target, gateway):
    named, chat = gateway.ask("/tokenize", {"prompt": "users", "return_token_strs": True}, {"messages": MESSAGES})
    assert named.json()["tokens"] == target.tokenizer.encode("users")
    assert named.json()["token_strs"] == target.tokenizer.convert_ids_to_tokens(named.json()["tokens"])
    assert chat.json()["tokens"] == target.render(MESSAGES)
    assert chat.json()["count"] == len(chat.json()["tokens"]) > 0


def test_the_description_of_the_tokenizer_has_what_clients_render_with(target, gateway):
    """`lm_eval` refuses a server without `eos_token`, and renders `chat_template` itself. Paths are not told."""
    answer = get(gateway, "/tokenizer_info")
    about, tokenizer = answer.json(), target.tokenizer
    assert about["eos_token"] == tokenizer.eos_token and about["chat_template"] == tokenizer.chat_template
    assert about["tokenizer_class"] == type(tokenizer).__name__ and about["model_max_length"] == target.context_length
    assert "/" not in answer.text.replace(tokenizer.chat_template, "").replace("application/json", "")
    (end,) = gateway.ask("/tokenize", {"prompt": about["eos_token"], "add_special_tokens": False})
    assert end.json()["tokens"] == [tokenizer.eos_token_id]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_a_wrong_field_is_named(gateway, path, body, param):
    (answer,) = gateway.ask(path, body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text


def test_methods_are_those_of_vllm(gateway):
    (posted,) = gateway.ask("/tokenizer_info", {})
    assert [get(gateway, path).status_code for path in ("/tokenize", "/detokenize")] == [405, 405]
    assert posted.status_code == 405
