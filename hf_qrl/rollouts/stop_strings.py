# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Where each reply of a batch ends. Rows have stop strings of their own: one's never cuts another's reply."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria


def find_stop(text: str, stop_strings: Iterable[str] | None) -> tuple[int, str] | None:
    """
    Finds the stop string that a text is cut after: the one that is complete first, the longest if several are.

    Args:
        text (`str`):
            A reply.
        stop_strings (`Iterable[str]`, *optional*):
            Its stop strings. Empty ones stop nothing.

    Returns:
        `tuple[int, str]` or `None`: end of the match, and the string.

    Examples:

    ```python
    >>> find_stop("go left</a>\\nor not\\n", ["\\n", "</a>"])
    (11, '</a>')
    ```
    """
    ends = [(text.find(string) + len(string), -len(string), string) for string in stop_strings or () if string in text]
    end, _, string = min((match for match in ends if match[2]), default=(0, 0, ""))
    return (end, string) if string else None


class RowStops(StoppingCriteria):
    """
    Ends each row of a batch at an eos token, one of its own stop strings, or its own number of tokens.

    Stop strings are looked for in the text, so it does not matter how they are cut into tokens. The token that
    completes one is the row's last, even if it says more.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.
        prompt_length (`int`):
            Number of tokens before the reply, padding included.
        stop_strings (`Sequence[list[str] | None]` of length `B`):
            Stop strings of each row.
        budgets (`Sequence[int]` of length `B`):
            Largest number of new tokens of each row.
        eos_token_ids (`Iterable[int]`):
            Tokens that end any row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        stop_strings: Sequence[list[str] | None],
        budgets: Sequence[int],
        eos_token_ids: Iterable[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        self.stop_strings = [[string for string in strings or () if string] for strings in stop_strings]
        self.budgets = list(budgets)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.token_ids: list[list[int]] = [[] for _ in self.budgets]
        self.finishes: list[str | None] = [None] * len(self.budgets)
        # A match lies within this many tokens: each says at least one byte, and the first may be half a character.
        self._tails = [max((len(string.encode()) for string in row), default=0) + 4 for row in self.stop_strings]
        self._silent = frozenset(tokenizer.all_special_ids)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Takes the newest token of each row of `input_ids (B, n)`, and returns which rows are done, `(B,)`."""
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.finishes[row] is None:
                self.token_ids[row].append(token)
                self.finishes[row] = self._finish(row, token)
        done = [finish is not None for finish in self.finishes]
        return torch.tensor(done, device=input_ids.device)

    def text(self, row: int) -> str:
        """The reply of a row, with the stop string that ended it and nothing after it."""
        tokens = self.token_ids[row]
        if self.finishes[row] == "eos":
            tokens = tokens[:-1]
        text = self._decode(tokens)
        stop = find_stop(text, self.stop_strings[row])
        return text if stop is None else text[: stop[0]]

    def _finish(self, row: int, token: int) -> str | None:
        tokens, strings = self.token_ids[row], self.stop_strings[row]
        if token in self.eos_token_ids:
            return "eos"
        if strings:
            said = [token for token in tokens[-2 * self._tails[row] :] if token not in self._silent]
            stop = find_stop(self._decode(said[-self._tails[row] :]), strings)
            if stop is not None:
                return f"stop:{stop[1]}"
        return "length" if len(tokens) >= self.budgets[row] else None

    def _decode(self, tokens: list[int]) -> str:
        # Raw: some tokenizers would else take blanks away.
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
