"""Secrets in messages: of options, of the environment, of URLs."""

from __future__ import annotations

import pytest

from rollout.redact import public_url, redact


def test_values_of_options_are_blanked_but_for_those_that_help() -> None:
    options = {
        "key": "AKIA-12345",
        "client_kwargs": {"endpoint_url": "http://host:9000", "headers": ["bearer-9876"]},
        "anon": "no",
        "timeout": 123456789,
    }
    text = "AKIA-12345 at http://host:9000 with bearer-9876: no answer within 123456789"
    assert redact(text, options) == "*** at http://host:9000 with ***: no answer within 123456789"


def test_a_secret_that_holds_another_leaves_nothing_of_itself() -> None:
    options = {"key": "secret", "token": "secret-and-more", "other": "and-more-of"}
    assert redact("secret-and-more, secret", options) == "***, ***"


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("AWS_SECRET_ACCESS_KEY", True),
        ("HF_TOKEN", True),
        ("DB_PASSWORD", True),
        ("AWS_REGION", False),
    ],
)
def test_secrets_of_the_environment_are_blanked(
    name: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "value-of-it")
    assert redact("got value-of-it", {}) == ("got ***" if hidden else "got value-of-it")
    monkeypatch.setenv(name, "short")
    assert redact("too short", {}) == "too short"


def test_users_and_signatures_of_urls_are_left_out() -> None:
    url = "https://user:pw@host/run?X-Amz-Signature=abc123&part=2&sig=def456"
    shown = "https://host/run?X-Amz-Signature=***&part=2&sig=***"
    assert public_url(url) == shown
    assert redact(f"PUT {url} failed", {}) == f"PUT {shown} failed"
