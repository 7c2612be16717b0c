"""Secrets are removed from plans, reports and messages, and nothing else."""

import pytest

from specctl.errors import redacted


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://me:HUSH@host:80/v1", "http://me:***@host:80/v1"),
        ("http://HUSH@host/v1", "http://***@host/v1"),
        ("no data in http:/me:HUSH@host", "no data in http:/me:***@host"),
        ("a.endpoint=http://me:HU@SH@host", "a.endpoint=http://me:***@host"),
        ("http://host/v1?api_key=HUSH&n=1", "http://host/v1?api_key=***&n=1"),
        ('{"password": "HUSH"}', '{"password": "***"}'),
        ("{auth_token: HUSH, n: 1}", "{auth_token: ***, n: 1}"),
        ({"api_key": "HUSH", "in": [{"token": "HUSH"}]}, {"api_key": "***", "in": [{"token": "***"}]}),
    ],
)
def test_secrets_are_masked(value, shown):
    assert redacted(value) == shown


@pytest.mark.parametrize(
    "value",
    [
        *("https://host/@me", "batch_tokens=64", "key_variable=OPENAI_API_KEY", "the token: of a text"),
        *({"bos_token": "<s>", "tokens": 3}, {"token": ""}, 3, None),
    ],
)
def test_other_values_are_unchanged(value):
    assert redacted(value) == value
