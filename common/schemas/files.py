"""The documents as files: what each holds, and the writing of them."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from common.schemas.asyncapi import document
from common.schemas.json_schema import bus_schemas, rank_schemas


def files() -> dict[PurePosixPath, bytes]:
    """Everything that is written, by its path below the folder of documents."""
    found: dict[PurePosixPath, Any] = {PurePosixPath("asyncapi.json"): document()}
    for folder, schemas in (("bus", bus_schemas()), ("rank", rank_schemas())):
        for tag, schema in schemas.items():
            found[PurePosixPath("schemas", folder, f"{tag}.json")] = schema
    return {path: _text(content) for path, content in found.items()}


def write(folder: Path) -> int:
    """Write them below `folder`, remove schemas of messages that are no more, and return how many there are."""
    wanted = {folder / path: content for path, content in files().items()}
    for old in set(folder.glob("schemas/*/*.json")) - set(wanted):
        old.unlink()
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return len(wanted)


def _text(content: Any) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
