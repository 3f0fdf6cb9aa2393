"""Text to token ids and back, without holding up anybody else."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from contracts.errors import ErrorCode, PdmeshError
from services.router.core.detokenizer import whole_text
from services.router.core.parameters import Prompt, check_token_ids
from services.router.model_directory import Model

A = TypeVar("A")
T = TypeVar("T")

TURN_CHARS: Final = 64
"""What a turn of a conversation counts beside its text: the template goes through each, an empty one as well."""


class Tokenizing:
    """Encodes prompts, and decodes what is not an answer of the mesh.

    A request of more than `inline_chars` is encoded by one of `num_threads` threads, which leave the interpreter's lock alone
    while they tokenize; a shorter one would wait longer for a thread than it takes. What counts is all that a client sends of it:
    its prompts together, or each turn with its role, its name and `TURN_CHARS`, and the arguments as JSON. An id to decode counts as one.
    """

    def __init__(self, model: Model, *, num_threads: int, inline_chars: int) -> None:
        self._model = model
        self._inline_chars = inline_chars
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def encode_prompts(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True
    ) -> Sequence[tuple[int, ...]]:
        """Return the ids of each prompt. Raises `PdmeshError` (`invalid_request`) for no ids and for ids out of range."""
        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        encoded: list[tuple[int, ...]] = []
        for prompt in prompts:
            ids = prompt
            if isinstance(ids, str):
                ids = await self._run(num_chars, lambda text: self._encode(text, add_special_tokens), ids)
            check_token_ids(ids, vocab_size=self._model.vocabulary.size)
            encoded.append(ids)
        return encoded

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        arguments: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation, by the model's template. Raises `PdmeshError` if it cannot be had."""
        template = self._model.chat_template
        if template is None:
            message = f"messages: {self._model.name} has no chat template; the rule is: use /v1/completions"
            raise PdmeshError(message, code=ErrorCode.INVALID_REQUEST, param="messages")

        def render(turns: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
            text = template.render(turns, add_generation_prompt=add_generation_prompt, arguments=arguments)
            return self._encode(text, add_special_tokens=False)  # the template writes them itself

        num_chars = sum(TURN_CHARS + sum(map(len, turn.values())) for turn in messages)
        if arguments:
            num_chars += len(msgspec.json.encode(arguments))
        ids = await self._run(num_chars, render, messages)
        check_token_ids(ids, vocab_size=self._model.vocabulary.size)
        return ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return await self._run(len(token_ids), lambda ids: whole_text(self._model.vocabulary, ids), token_ids)

    def close(self) -> None:
        """End the threads; what they still encode is not waited for. Twice is fine."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, work: Callable[[A], T], argument: A) -> T:
        if size <= self._inline_chars:
            return work(argument)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, argument)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # The batch call releases the interpreter's lock while it works; the plain one does not.
        batch = self._model.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)
