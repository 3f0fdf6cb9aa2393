"""When a router says that it is ready and why not, and what else it can be asked."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from common.bus.storage import LINKS_CONFIG
from contracts.codec import encode
from contracts.links import LinkRecord, LinkState
from tests.integration.router_world import (
    ANSWER,
    MAX_POSITION,
    PATIENCE_S,
    linked_pair,
    record,
    router_world,
)

PLAIN = {"model": "tiny", "prompt": "hello"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


async def test_the_clients_request_id_is_echoed_and_nothing_more(tmp_path: Path) -> None:
    """Made safe, on successes and errors; ids inside the mesh are ours."""
    async with router_world(tmp_path) as world:
        headers = {"x-request-id": "a.b>*{c} d"}
        _, answer, got = await world.post("/v1/completions", PLAIN, headers=headers)
        assert got["x-request-id"] == "a.bcd"
        assert "a.bcd" not in answer["id"]
        assert world.mesh.submits[0].request_id.startswith("r")
        _, answer, got = await world.post("/v1/completions", b"{", headers=headers)
        assert got["x-request-id"] == answer["error"]["request_id"] == "a.bcd"
        _, answer, got = await world.post("/v1/nothing", PLAIN)
        assert got["x-request-id"] == answer["error"]["request_id"] != ""
        _, _, got = await world.post("/v1/completions", PLAIN)
        assert got["x-request-id"]


async def test_ready_waits_for_all_expected_workers(tmp_path: Path) -> None:
    """Readiness names who is missing; requests are served as soon as there is a way."""
    async with router_world(tmp_path, expected_workers=("prefill-0", "decode-0")) as world:
        assert (await world.get("/ready"))[0] == 200
    records = [linked_pair()[1], record("prefill-0")]
    async with router_world(tmp_path / "unlinked", records=[], expected_workers=("prefill-0", "decode-0")) as world:
        await world.mesh.open(records)
        status, answer = await world.get("/ready")
        assert status == 503
        assert answer["missing"]


async def test_ready_and_refused_requests_say_why_a_pair_is_not_linked(tmp_path: Path) -> None:
    """The prefill worker's reason reaches the operator and the client; once the pair is linked, both are content."""
    prefill, decode, link = linked_pair()
    assert isinstance(link, LinkRecord)
    refused = msgspec.structs.replace(link, state=LinkState.REFUSED, rule="same_dtypes", reason="dtypes: planted")
    reason = "prefill-0 has refused decode-0: dtypes: planted"
    expected = ("prefill-0", "decode-0")
    settings: dict[str, Any] = {"expected_workers": expected, "max_attempts": 1}
    async with router_world(tmp_path, records=[], **settings) as world:
        records = [prefill, decode, refused]
        await world.mesh.open(records)
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await world.get("/ready"))[1]["missing"] != [reason]:
                pass
        assert answer[0] == 503
        status, body, _ = await world.post("/v1/completions", PLAIN)
        assert status == 503
        assert reason in body["error"]["message"]
        assert world.mesh.submits == []
        records[2] = link  # what the mesh repeats from now on
        links = await world.mesh.bus.ensure_bucket(LINKS_CONFIG)
        await links.put("prefill-0.decode-0", encode(link))
        async with asyncio.timeout(PATIENCE_S):
            while (await world.get("/ready"))[0] != 200:
                pass


async def test_ready_means_that_the_broker_would_take_a_request(tmp_path: Path) -> None:
    """Workers alone do not make a way: without a broker the router is not ready."""
    async with router_world(tmp_path) as world:
        assert (await world.get("/ready"))[0] == 200
        world.mesh.broker_answers = False
        status, answer = await world.get("/ready")
        assert status == 503
        assert [text.partition(":")[0] for text in answer["missing"]] == ["the broker does not answer"]


async def test_ready_means_that_the_broker_lets_requests_last_as_long(tmp_path: Path) -> None:
    """Where it would refuse each of them, that is seen before the first one comes."""
    async with router_world(tmp_path, request_timeout_s=600.0) as world:
        world.mesh.max_timeout_ms = 600_000
        assert (await world.get("/ready"))[0] == 200
        world.mesh.max_timeout_ms = 599_999
        status, answer = await world.get("/ready")
        reason = "request_timeout_s 600 is more than the 599.999 of the broker's record_ttl_s"
        assert (status, answer["missing"]) == (503, [reason])


async def test_tokenize_and_detokenize_agree(tmp_path: Path) -> None:
    """There and back, for text and for conversations; special tokens are shown."""
    async with router_world(tmp_path) as world:
        status, answer, _ = await world.post("/tokenize", {"prompt": ANSWER})
        assert (status, answer["count"], answer["max_model_len"]) == (200, len(answer["tokens"]), MAX_POSITION)
        assert (await world.post("/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": ANSWER}
        _, answer, _ = await world.post("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})
        _, text, _ = await world.post("/detokenize", {"tokens": answer["tokens"]})
        assert text == {"prompt": "<|im_start|>user\nhello<|im_end|>\n"}
        for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [320]}), ("/tokenize", PLAIN | CHAT)):
            assert (await world.post(path, body))[0] == 400


async def test_models_are_listed(tmp_path: Path) -> None:
    """By the name that requests use."""
    async with router_world(tmp_path, served_model_name="org/name", records=[]) as world, world.client() as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["org/name"]
        assert (await client.models.retrieve("org/name")).id == "org/name"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
