"""Bodies that are not what their headers say."""

from pathlib import Path

import pytest

from tests.integration.router_world import ANSWER, router_world

PLAIN = {"model": "tiny", "prompt": "hello"}


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_in_another_coding_than_announced_is_the_clients_mistake(tmp_path: Path, coding: str) -> None:
    """400 that names the coding, no 500; the next client is served."""
    async with router_world(tmp_path) as world:
        status, answer, headers = await world.post(
            "/v1/completions", b'{"model": "tiny"}', headers={"Content-Encoding": coding}
        )
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert coding in answer["error"]["message"]
        assert headers["x-should-retry"] == "false"
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert (status, answer["choices"][0]["text"]) == (200, ANSWER)


async def test_an_error_about_max_tokens_uses_the_name_that_the_client_used(tmp_path: Path) -> None:
    """Both names mean the same, and only the one that was sent can be mended by the client."""
    async with router_world(tmp_path) as world:
        for field in ("max_tokens", "max_completion_tokens"):
            status, answer, _ = await world.post("/v1/completions", PLAIN | {field: 1_000_000})
            assert (status, answer["error"]["param"]) == (400, field)
            assert field in answer["error"]["message"]
