"""The server process: found in the right order, started, restarted, stopped."""

import http.client
import json
import stat
from pathlib import Path

import pytest

from common.bus.errors import ServerTooOld
from common.bus.server import NatsServer, ServerNotStarted, check_version, find_server, forget_indexes, parse_version


def script(path: Path, text: str) -> Path:
    """Write an executable."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_variable_names_the_program_or_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NATS_SERVER_BIN wins over everything; a path that is no file is told, not passed over."""
    program = script(tmp_path / "other", "true")
    monkeypatch.setenv("NATS_SERVER_BIN", str(program))
    assert find_server() == program
    monkeypatch.setenv("NATS_SERVER_BIN", str(tmp_path / "nowhere"))
    with pytest.raises(ServerNotStarted, match="nowhere"):
        find_server()


def test_the_installed_program_is_found_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package nats-server-bin, whatever PATH says; and a clear error if there is nothing at all."""
    monkeypatch.delenv("NATS_SERVER_BIN", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_server().name == "nats-server"
    monkeypatch.setattr("common.bus.server._candidates", lambda: iter(()))
    with pytest.raises(ServerNotStarted, match="NATS_SERVER_BIN"):
        find_server()


def test_versions_are_read_and_old_ones_refused(tmp_path: Path) -> None:
    """From 2.11 on; release candidates count; text without a version is refused too."""
    assert parse_version("nats-server: v2.15.1") == (2, 15, 1)
    check_version("2.11.0")
    check_version("v2.12.0-RC.1")
    check_version("3.0.0")
    for text in ("2.10.29", "nats-server: v2.9.10", "1.99.0", "unknown"):
        with pytest.raises(ServerTooOld):
            check_version(text)
    with pytest.raises(ServerTooOld):
        NatsServer(tmp_path, binary=script(tmp_path / "old", "echo nats-server: v2.9.10")).start()


def test_a_server_that_does_not_come_up_is_told_with_its_log(tmp_path: Path) -> None:
    """It exits, or cannot be run: ServerNotStarted says why, and nothing is left running."""
    broken = script(tmp_path / "broken", 'if [ "$1" = -v ]; then echo v2.15.1; else echo no disk >&2; exit 3; fi')
    server = NatsServer(tmp_path / "store", binary=broken)
    with pytest.raises(ServerNotStarted, match=r"status 3\): no disk"):
        server.start()
    assert (server.is_running, server.pid) == (False, None)
    with pytest.raises(ServerNotStarted, match="cannot be run"):
        NatsServer(tmp_path / "store", binary=tmp_path / "absent").start()


def test_a_frozen_server_is_alive_and_can_be_stopped(tmp_path: Path) -> None:
    """It answers nothing until it thaws, thawing twice is fine, and stopping needs no thaw; freezing nothing is told."""
    server = NatsServer(tmp_path)
    with pytest.raises(ServerNotStarted, match="does not run"):
        server.freeze()
    with server:
        server.freeze()
        assert server.is_running
        assert not server._is_healthy()
        server.thaw()
        server.thaw()
        assert server._is_healthy()
        server.freeze()
        server.stop()
        assert not server.is_running


def test_a_configuration_reaches_the_server(tmp_path: Path) -> None:
    """What the command line cannot say; an error in it is told."""
    with NatsServer(tmp_path / "one", config="max_pending: 2000000") as server:
        connection = http.client.HTTPConnection(server.monitor_url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/varz")
        told = json.loads(connection.getresponse().read())
        connection.close()
    assert told["max_pending"] == 2_000_000
    with pytest.raises(ServerNotStarted, match="no_such_option"):
        NatsServer(tmp_path / "two", config="no_such_option: 1").start()


def test_it_comes_back_at_the_same_address_and_can_be_ended_twice(tmp_path: Path) -> None:
    """Ports are chosen once; it listens on loopback only; starting what runs and ending what is ended do nothing."""
    with NatsServer(tmp_path) as server:
        url, pid = server.url, server.pid
        server.start()
        assert server.pid == pid
        connection = http.client.HTTPConnection(server.monitor_url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/varz")
        assert b'"host": "127.0.0.1"' in connection.getresponse().read()
        connection.close()
        server.kill()
        server.kill()
        assert (server.is_running, server.pid) == (False, None)
        server.start()
        assert server.url == url
        server.stop()
    assert not server.is_running


def test_a_summary_of_the_last_stop_is_not_trusted(tmp_path: Path) -> None:
    """What the server wrote of its streams when it was last stopped is gone when it starts again; the streams themselves stay."""
    folder = tmp_path / "jetstream" / "$G" / "streams" / "KV_B" / "msgs"
    folder.mkdir(parents=True)
    (folder / "index.db").write_bytes(b"older than the stream")
    (folder / "1.blk").touch()
    forget_indexes(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["1.blk"]
