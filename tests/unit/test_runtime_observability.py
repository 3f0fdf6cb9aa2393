"""Logs, metrics and the admin port."""

import io
import json
import logging
import socket
from collections.abc import Iterator

import aiohttp
import pytest
import structlog

from common.runtime.admin import AdminRoutes, AdminServer
from common.runtime.lifecycle import State
from common.runtime.logging import configure_logging
from common.runtime.metrics import Metrics
from contracts.errors import InvalidValueError


@pytest.fixture
def sink() -> Iterator[io.BytesIO]:
    """Where log lines go; the library's state is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.BytesIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(sink: io.BytesIO) -> list[dict[str, object]]:
    """Decode every line."""
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_log_lines_are_json_with_the_fields_of_the_process(sink: io.BytesIO) -> None:
    """One object a line: event, level, time, the service's own fields and those of the call."""
    log = configure_logging("decode", stream=sink, worker_id="decode-0")
    log.info("request_finished", request_id="r1", num_output_tokens=3)
    log.debug("not_shown")
    (line,) = lines(sink)
    assert str(line.pop("time")).endswith("Z")
    assert line == {
        "event": "request_finished",
        "level": "info",
        "service": "decode",
        "worker_id": "decode-0",
        "request_id": "r1",
        "num_output_tokens": 3,
    }


def test_libraries_come_out_alike_and_prompts_do_not_come_out(sink: io.BytesIO) -> None:
    """`logging` records become our lines with their error; what people wrote is withheld."""
    log = configure_logging("router", stream=sink)
    try:
        int("planted")
    except ValueError:
        logging.getLogger("nats").exception("lost %s", "it")
    log.warning("request_refused", prompt="my secret")
    library, refused = lines(sink)
    assert (library["event"], library["library"], library["message"]) == ("library_logged", "nats", "lost it")
    assert "planted" in str(library["exception"])
    assert refused["prompt"] == "(withheld)"


def test_an_unknown_level_is_refused() -> None:
    """The error names the value and the rule."""
    with pytest.raises(ValueError, match="log_level: 'loud' is not allowed; the rule is: one of debug"):
        configure_logging("router", level="loud")


def test_metrics_have_the_prefix_and_keep_to_the_conventions() -> None:
    """Names get `pdmesh_`; wrong units, prefixes and counters without `_total` are refused."""
    metrics = Metrics()
    metrics.counter("requests_total", "Requests.", ["role"]).labels("decode").inc(2)
    metrics.gauge("free_blocks", "Blocks.").set(7)
    metrics.histogram("step_seconds", "Steps.").observe(0.002)
    text = metrics.exposition().decode()
    assert 'pdmesh_requests_total{role="decode"} 2.0' in text
    assert "pdmesh_free_blocks 7.0" in text
    assert 'pdmesh_step_seconds_bucket{le="0.0025"} 1.0' in text
    assert "pdmesh_requests_total" not in Metrics().exposition().decode()
    with pytest.raises(ValueError, match="_total"):
        metrics.counter("requests", "Requests.")
    for name in ("step_ms", "pdmesh_x", "Upper", "a__b"):
        with pytest.raises(ValueError, match=name):
            metrics.gauge(name, "Wrong.")


async def test_the_admin_port_tells_health_readiness_and_metrics() -> None:
    """Ready means state READY and every check; a failing check is named; closing twice is fine."""
    state, connected, alive = State.STARTING, False, True
    metrics = Metrics()
    metrics.gauge("free_blocks", "Blocks.").set(7)
    server = AdminServer(
        AdminRoutes(
            state=lambda: state, metrics=metrics, alive={"loop": lambda: alive}, ready={"bus": lambda: connected}
        )
    )
    port = await server.start()
    assert port == server.port > 0
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:

        async def ask(path: str) -> tuple[int, dict[str, object]]:
            async with client.get(path) as answer:
                return answer.status, await answer.json()

        assert await ask("/health") == (200, {"state": "starting", "failing": []})
        assert await ask("/ready") == (503, {"state": "starting", "failing": ["bus"]})
        state = State.READY
        assert (await ask("/ready"))[0] == 503
        connected = True
        assert await ask("/ready") == (200, {"state": "ready", "failing": []})
        alive = False
        assert await ask("/health") == (503, {"state": "ready", "failing": ["loop"]})
        async with client.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            assert "pdmesh_free_blocks 7.0" in await answer.text()
    await server.close()
    await server.close()
    assert server.port == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no-such-host.invalid"])
async def test_an_admin_port_that_cannot_be_had_is_an_error_and_leaves_nothing_behind(host: str) -> None:
    """It is taken, or the address is not this machine's: the start fails and says what would do; it can be closed as if it had not been."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        routes = AdminRoutes(state=lambda: State.READY, metrics=Metrics())
        port = other.getsockname()[1]
        server = AdminServer(routes, host=host, port=port)
        text = f"admin_host:admin_port: '{host}:{port}' is not allowed; the rule is: an address of this machine"
        with pytest.raises(InvalidValueError, match=text):
            await server.start()
        await server.close()
