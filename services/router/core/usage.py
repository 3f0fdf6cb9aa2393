"""Tokens read and written for one HTTP request."""

from contracts.openai import PromptTokensDetails, Usage


class UsageMeter:
    """Counts over all choices. A prompt counts once, however many answers to it were asked for."""

    def __init__(self, *, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._cached: dict[int, int] = {}

    def add_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._num_completion_tokens += count

    def note_cached(self, prompt: int, num_cached_tokens: int) -> None:
        """Note what prefill counted as cached of the prompt with this number."""
        self._cached[prompt] = num_cached_tokens

    @property
    def usage(self) -> Usage:
        """The figures up to now."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )
