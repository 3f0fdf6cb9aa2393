"""The tokenizer: byte-level BPE with Qwen's way of cutting text into words, and the added tokens of chat and recall."""

from collections.abc import Iterable
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from loadtest import recall

# As in Qwen3.5's published tokenizer: contractions, words with one leading mark, single digits, punctuation, line ends, spaces.
_SPLIT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
END: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
VOCAB_SIZE: Final = recall.FIRST_VALUE_TOKEN + recall.NUM_VALUES


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from texts; the ids of added tokens are those of `loadtest.recall`, and are checked."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recall.END_TOKEN,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (END, TURN_START, TURN_END)]
    )
    # Recall tokens are part of an answer, so a server that leaves out special tokens must still print them.
    tokens = range(recall.LIST_TOKEN, VOCAB_SIZE)
    tokenizer.add_tokens([AddedToken(recall.to_text([token]), special=False, normalized=False) for token in tokens])
    for token in (recall.END_TOKEN, *tokens):
        if tokenizer.token_to_id(recall.to_text([token])) != token:
            raise ValueError(
                f"the text is too short for {recall.END_TOKEN} tokens: {recall.to_text([token])} did not get id {token}"
            )
    return tokenizer
