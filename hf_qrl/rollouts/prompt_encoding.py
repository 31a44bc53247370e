# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Prompts of conversations that go on, of which only what is new is encoded."""

import re
import string
from itertools import chain, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase


class SegmentEncoder:
    """
    Encodes texts of which much has been encoded before, as the prompts of a conversation that goes on have.

    Texts are cut before each added token that [`segment_starts`] finds. The tokenizer cuts them there first of all and
    encodes every part on its own, so a segment has the same tokens in every text. Only the segments of the last call
    are remembered: memory does not grow with the episodes, and whatever a history becomes, its tokens are right.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._settings: Any = None
        self._starts: re.Pattern[str] | None = None
        self._known: dict[str, list[int]] = {}

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Returns `tokenizer(text, add_special_tokens=False)["input_ids"]` of each text."""
        settings = (self.tokenizer.added_tokens_decoder, self.tokenizer.split_special_tokens)
        if settings != self._settings:  # tokens may be added at any time
            self._settings, self._starts, self._known = settings, segment_starts(self.tokenizer), {}
        rows = [self._segments(text) for text in texts]
        segments = dict.fromkeys(chain.from_iterable(rows))
        new = [segment for segment in segments if segment not in self._known]
        if new:
            encoded = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self._known.update(zip(new, encoded, strict=True))
        self._known = {segment: self._known[segment] for segment in segments}
        return [list(chain.from_iterable(self._known[segment] for segment in row)) for row in rows]

    def _segments(self, text: str) -> list[str]:
        if self._starts is None:
            return [text]
        cuts = [0, *(match.start() for match in self._starts.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts) if start < end]


def segment_starts(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """
    Returns a pattern of the added tokens before which any text can be cut without changing its tokens; `None` if there
    are none.

    They are looked for in the raw text, and begin with a punctuation mark that no such token has further inside. So
    nothing reaches over the cut: no longer token, no blanks that go with a token (`lstrip`), and no condition on what
    is beside it (`single_word`, for which a punctuation mark is as good as the end of the text).
    """
    if tokenizer.split_special_tokens:
        return None
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.normalized and token.content]
    inside = {character for token in added for character in token.content[1:]}
    # Where such a token may begin, what is before it decides whether it does.
    conditional = {token.content[0] for token in added if token.lstrip or token.single_word}
    marks = set(string.punctuation) - {"_"} - inside - conditional
    contents = sorted(re.escape(token.content) for token in added if token.content[0] in marks)
    return re.compile("|".join(contents)) if contents else None
