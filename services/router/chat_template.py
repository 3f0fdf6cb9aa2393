"""A model's chat template: from a conversation to the text of a prompt."""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jinja2
import jinja2.ext
import jinja2.sandbox

from contracts.errors import ErrorCode, InvalidValueError, PdmeshError

_OURS = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """A compiled template, in a sandbox: it comes with the model and is not trusted. Safe to use from several threads.

    `names` are what templates may refer to beside the conversation: `bos_token` and the like. `wall_time` tells the
    seconds since 1970 UTC, for templates that print the date. Raises ValueError for a template that does not compile.
    """

    def __init__(self, source: str, *, names: Mapping[str, Any], wall_time: Callable[[], float]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: dt.datetime.fromtimestamp(wall_time(), dt.UTC).strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._names = dict(names)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. `arguments` are the template's own switches.

        Raises `PdmeshError` (`invalid_request`) with the template's words if it refuses the conversation.
        """
        arguments = arguments or {}
        for name in sorted(_OURS & arguments.keys()):
            raise InvalidValueError(field=f"chat_template_kwargs.{name}", value=arguments[name], rule="left out")
        names = {**self._names, **arguments, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names | {"tools": None, "documents": None})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            message = f"messages: the chat template refuses them: {error}"
            raise PdmeshError(message, code=ErrorCode.INVALID_REQUEST, param="messages") from error


def _refuse(message: object) -> Never:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON as templates expect it: without the escapes that jinja's own filter adds for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
