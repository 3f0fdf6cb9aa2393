"""What must hold of a running stack: how its containers are shut in, and that a request is answered as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from compose.events import check_handoff
from compose.problem import ComposeError
from compose.stack import Stack

_REFERENCE: Final = Path(__file__).resolve().parents[1] / "tests" / "integration" / "reference" / "tiny.json"
_NUM_TOKENS: Final = 16
_FIRST_PROMPT_TOKENS: Final = 100
_CHAT: Final = "Tell me what happened in the garden."
_CHAT_TOKENS: Final = 24
_UID: Final = 10001

# Run inside a container, with nothing but the standard library.
_INSIDE: Final = """
import json, os
status = dict(line.split(':', 1) for line in open('/proc/1/status').read().splitlines())
try:
    open('/opt/written', 'w'); written = True
except OSError:
    written = False
print(json.dumps({'uid': os.getuid(), 'gid': os.getgid(), 'capabilities': int(status['CapEff'], 16) | int(status['CapBnd'], 16),
                  'no_new_privileges': int(status['NoNewPrivs']), 'written': written}))
"""


def check_containers(stack: Stack) -> None:
    """Raise ComposeError unless every container is shut in as its file says, by what the daemon and the kernel tell."""
    problems: list[str] = []
    for service in stack.services:
        container = stack.inspect(service)
        for rule, holds in {**_outside(container), **_inside(stack, service)}.items():
            if not holds:
                problems.append(f"{service}: {rule}")
    if problems:
        raise ComposeError("of the containers, this does not hold:\n  " + "\n  ".join(problems))


def check_requests(stack: Stack) -> str:
    """Answer a completion with known tokens and a chat stream, and read their handoffs; the completion's request id."""
    prompt, expected = _known()
    request_id, tokens = stack.client.complete(prompt, _NUM_TOKENS)
    if tokens != expected:
        raise ComposeError(f"the completion is {tokens}, the reference says {expected}")
    chat_id, text, num_tokens = stack.client.chat(_CHAT, _CHAT_TOKENS)
    if num_tokens != _CHAT_TOKENS or not text:
        raise ComposeError(f"the chat answer has {num_tokens} tokens, not {_CHAT_TOKENS}: {text!r}")
    for each in (request_id, chat_id):
        check_handoff(stack.nats_url, each)
    return request_id


def check_served(stack: Stack) -> None:
    """Raise ComposeError unless a completion is answered with the known tokens, now and at the first try."""
    prompt, expected = _known()
    _, tokens = stack.client.complete(prompt, _NUM_TOKENS)
    if tokens != expected:
        raise ComposeError(f"the completion is {tokens}, the reference says {expected}")


def _known() -> tuple[list[int], tuple[int, ...]]:
    """A prompt of several blocks and chunks of the cache, and how the reference implementation goes on."""
    prompts = json.loads(_REFERENCE.read_text(encoding="utf-8"))["prompts"]
    prompt = next(each for each in prompts if len(each["token_ids"]) >= _FIRST_PROMPT_TOKENS)
    return prompt["token_ids"], tuple(prompt["output_ids"][:_NUM_TOKENS])


def _outside(container: dict[str, Any]) -> dict[str, bool]:
    host = container["HostConfig"]
    ports = [binding for bindings in (host["PortBindings"] or {}).values() for binding in bindings]
    return {
        "its root is read-only": host["ReadonlyRootfs"] is True,
        "all capabilities are dropped": host["CapDrop"] == ["ALL"] and not host["CapAdd"],
        "it gains no privileges": "no-new-privileges:true" in host["SecurityOpt"] and not host["Privileged"],
        "its memory is limited": host["Memory"] > 0,
        "its processors are limited": host["NanoCpus"] > 0,
        "its processes are limited": (host["PidsLimit"] or 0) > 0,
        "its logs are limited": "max-size" in host["LogConfig"]["Config"],
        "it is started again": host["RestartPolicy"]["Name"] == "unless-stopped",
        "its ports are on the loopback interface": all(binding["HostIp"] == "127.0.0.1" for binding in ports),
        "it is healthy": container["State"]["Health"]["Status"] == "healthy",
        "it was never started again": container["RestartCount"] == 0,
    }


def _inside(stack: Stack, service: str) -> dict[str, bool]:
    seen = json.loads(stack.execute(service, "python", "-IS", "-c", _INSIDE))
    return {
        f"it runs as user {_UID}": seen["uid"] == seen["gid"] == _UID,
        "it has no capabilities": seen["capabilities"] == 0,
        "the kernel gives it no privileges": seen["no_new_privileges"] == 1,
        "nothing can be written to its root": not seen["written"],
    }
