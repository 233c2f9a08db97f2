"""A server behind a proxy for HTTPS; `tests/e2e/test_servers_at.py` trains through one."""

import asyncio
from pathlib import Path

import pytest

from answering import Address
from certificates import loopback_certificate
from e2e.shaped_link import ShapedLink
from qurl_megatron.rollout import requests
from qurl_megatron.rollout.requests import NoAnswer, ask


def test_https_is_believed_with_the_certificate_that_is_trusted_and_asks_no_other_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    certificate, trusted = loopback_certificate(tmp_path)
    address = Address(text='{"healthy": true}')
    with address.answering():
        port = int(address.url.rpartition(":")[2])
        with ShapedLink(port, 1e8, certificate) as link:
            assert link.url.startswith("https://")
            url = f"{link.url}/health"
            requests.certificates.cache_clear()
            with pytest.raises(NoAnswer, match="(?i)certificate"):
                asyncio.run(ask("GET", url, {}, timeout_s=20))
            monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
            requests.certificates.cache_clear()
            try:
                answer = asyncio.run(ask("GET", url, {}, timeout_s=20))
                assert answer.fields() == {"healthy": True}
            finally:
                requests.certificates.cache_clear()
    assert len(address.asked) == 1
