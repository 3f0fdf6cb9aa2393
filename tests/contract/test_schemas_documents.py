"""The schemas and the AsyncAPI document in `docs`: as the contracts make them, well formed, and complete."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from common.bus.rules import matches
from common.schemas.asyncapi import address, channel_name, document
from common.schemas.files import files, write
from common.schemas.json_schema import bus_schemas, rank_schemas
from contracts import subjects
from contracts.operations import OPERATIONS, bus_kinds
from contracts.subjects import TABLE, BrokerVerb, WorkerVerb
from tests.contract.golden_messages import bus_kinds as golden_kinds

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # it names a field of a model "schema", and pydantic minds
    from asyncapi3.models import AsyncAPI3

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_documents_are_those_that_the_contracts_make() -> None:
    """After a change of the contracts: `make schemas`."""
    stale = [str(path) for path, content in files().items() if _read(DOCS / path) != content]
    assert stale == []
    left_over = {path.relative_to(DOCS) for path in DOCS.glob("schemas/**/*.json")} - {Path(path) for path in files()}
    assert left_over == set()


def test_a_changed_contract_is_seen_and_old_schemas_are_removed(tmp_path: Path) -> None:
    """The comparison above can fail; writing again mends it, and drops what no message needs any more."""
    write(tmp_path)
    changed, gone = tmp_path / "schemas/bus/ping.json", tmp_path / "schemas/bus/no_message.json"
    changed.write_bytes(changed.read_bytes() + b" ")
    gone.write_bytes(b"{}")
    assert any(_read(tmp_path / path) != content for path, content in files().items())
    write(tmp_path)
    assert all(_read(tmp_path / path) == content for path, content in files().items())
    assert not gone.exists()


@pytest.mark.parametrize("schemas", [bus_schemas(), rank_schemas()], ids=["bus", "rank"])
def test_every_schema_is_one(schemas: dict[str, dict[str, Any]]) -> None:
    """Each is valid by the meta-schema of its dialect, and its references lead to its own definitions."""
    for tag, schema in schemas.items():
        Draft202012Validator.check_schema(schema)
        assert schema["properties"]["type"]["enum"] == [tag]
        for reference in _references(schema):
            assert _resolved(schema, reference), reference


def test_the_document_is_asyncapi_3() -> None:
    """By a model of the specification that refuses unknown and missing fields."""
    AsyncAPI3.model_validate(document())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda doc: doc["info"].pop("version"),
        lambda doc: doc["servers"]["nats"].pop("protocol"),
        lambda doc: doc["channels"]["submit"].update(adress="x"),
        lambda doc: doc["channels"]["submit"]["parameters"]["partition"].update(schema={}),
        lambda doc: doc["operations"]["router_sends_submit"].update(action="publish"),
        lambda doc: doc["operations"]["router_sends_submit"]["bindings"]["nats"].update(stream="x"),
        lambda doc: doc["components"]["messages"]["ping"].update(body={}),
    ],
)
def test_a_document_that_breaks_the_specification_is_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    """So that the test before says something."""
    spoiled = copy.deepcopy(document())
    spoil(spoiled)
    with pytest.raises(ValueError, match="validation error"):
        AsyncAPI3.model_validate(spoiled)


def test_every_reference_of_the_document_leads_somewhere() -> None:
    """Inside the document, and to the files beside it."""
    whole = document()
    for reference in _references(whole):
        if reference.startswith("#"):
            assert _resolved(whole, reference), reference
        else:
            assert (DOCS / reference).is_file(), reference


def test_the_messages_of_an_operation_are_those_of_its_channel() -> None:
    """An operation may use a part of what its channel carries, and of the answers, never anything else."""
    whole = document()
    for name, operation in whole["operations"].items():
        for half in (operation, operation.get("reply", {})):
            channel = half.get("channel", {}).get("$ref")
            for message in half.get("messages", ()):
                assert message["$ref"].startswith(f"{channel}/messages/"), name


def test_every_subject_of_the_table_has_a_channel_and_every_channel_a_subject() -> None:
    """A row that nobody uses, and an operation beside the table, are both seen here."""
    assert {operation.row for operation in OPERATIONS} == {row.purpose for row in TABLE}
    for operation in OPERATIONS:
        row = operation.subject_row.subject
        pattern = re.sub(r"\{[a-z]+\}", "*", row)
        expected = f"$KV.{row}.>" if "." not in row else pattern
        assert matches(expected, address(operation)), operation.name
    names = [channel_name(operation) for operation in OPERATIONS]
    assert len(set(names)) == len(names)
    assert len({address(operation) for operation in OPERATIONS}) == len(names)


def test_every_verb_is_asked_of_somebody() -> None:
    """A new verb needs an operation; each subject is the one that the functions beside the table spell."""
    to_workers = {operation.verb: operation for operation in OPERATIONS if operation.row == "call a worker"}
    to_broker = {operation.verb: operation for operation in OPERATIONS if operation.row == "call the broker"}
    assert set(to_workers) == set(WorkerVerb)
    assert set(to_broker) == set(BrokerVerb)
    for worker_verb in WorkerVerb:
        operation = to_workers[worker_verb]
        spelled = subjects.worker_rpc(operation.roles[0], "worker-0", worker_verb)
        assert _filled(address(operation), role=operation.roles[0], worker="worker-0") == spelled
    for broker_verb in BrokerVerb:
        assert _filled(address(to_broker[broker_verb]), partition="0") == subjects.broker_rpc(broker_verb)


def test_every_message_is_said_by_somebody() -> None:
    """A struct of the contracts without an operation would be documented nowhere, and tested by no unfriendly peer."""
    assert set(bus_kinds()) == golden_kinds()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _filled(template: str, **values: str) -> str:
    return template.format(**values)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def _resolved(whole: dict[str, Any], reference: str) -> Any:
    place: Any = whole
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place
