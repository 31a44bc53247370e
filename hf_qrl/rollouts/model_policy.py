# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A language model as a policy: it reads what training reads, and every row is sampled for itself."""

import copy
from contextlib import suppress
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat import ChatRenderer, Message, model_role, training_chat_template, window_messages
from ..data.episodes import PLAIN_CHAT_TEMPLATE
from ..data.seq2seq import Seq2SeqRenderer
from .policy import OVERFLOW, Action, Policy
from .prompt_encoding import SegmentEncoder
from .sampling import RowSampler
from .stop_strings import RowStops


class ModelPolicy(Policy):
    """
    Acts with a causal or an encoder-decoder language model, with or without ILQL heads.

    **A turn's prompt has exactly the tokens that training puts before that turn**: it is made by the same code, from
    the raw messages, with [`training_chat_template`] and the model's `history_window`. A causal model whose tokenizer
    has no chat template reads the contents of the messages one after the other; to train on such episodes set
    `tokenizer.chat_template = PLAIN_CHAT_TEMPLATE`.

    Only conversations that are asked for are in the batch, padded on the left (for an encoder on the right). The model
    is in evaluation mode while it acts, and no global random state is used: replies follow from the seeds, not from
    the batch, up to the rounding of floating point.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        max_new_tokens (`int`, *optional*, defaults to 64):
            Largest number of tokens of a reply.
        do_sample (`bool`, *optional*, defaults to `True`):
            Whether to sample, rather than to take the most probable tokens.
        temperature (`float`, *optional*, defaults to 1.0), top_k (`int`, *optional*), top_p (`float`, *optional*):
            As in `generate`. Those in `model.generation_config` are not used.
        beta (`float`, *optional*):
            Weight of the advantage of a model with ILQL heads; `config.beta` if not given.
        batch_size (`int`, *optional*, defaults to 32):
            Largest number of conversations that are generated for at once.
        chat_template (`str`, *optional*):
            Template to read conversations with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 64,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        beta: float | None = None,
        batch_size: int = 32,
        chat_template: str | None = None,
    ) -> None:
        if max_new_tokens < 1 or batch_size < 1:
            raise ValueError(
                f"`max_new_tokens` and `batch_size` must be at least 1, got {max_new_tokens} and {batch_size}."
            )
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.batch_size, self.beta = max_new_tokens, batch_size, beta
        self.sampling: dict[str, Any] = {
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.history_window: int | None = getattr(model.config, "history_window", None)  # of models with heads
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.tokenizer_id = tokenizer.name_or_path
        if chat_template is None and tokenizer.chat_template:
            chat_template = training_chat_template(tokenizer)
        self.chat_template = chat_template
        self._encoder = SegmentEncoder(tokenizer)
        # Positions that the model can tell apart; encoder-decoder models count theirs on both sides.
        self._positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def prompt(self, messages: list[Message], tools: list | None = None) -> list[int]:
        """Returns the tokens that the model reads when it is asked for the next assistant message."""
        if self.history_window is not None:
            messages = window_messages(messages, self.history_window)
        where = "The conversation"
        if self.is_encoder_decoder:
            start = self.model.generation_config.decoder_start_token_id
            chat = ChatRenderer(self.tokenizer, self.chat_template, where, tools) if self.chat_template else None
            return Seq2SeqRenderer(self.tokenizer, start, where, chat=chat).source(messages)
        return ChatRenderer(self.tokenizer, self.chat_template or PLAIN_CHAT_TEMPLATE, where, tools).prompt(messages)

    def prompts(self, conversations: list[list[Message]], tools: list[list | None]) -> list[list[int]]:
        """
        Returns the [`~ModelPolicy.prompt`] of each conversation. Where that is safe, only what was not in the prompts
        of the last call is encoded.
        """
        rows = list(zip(conversations, tools, strict=True))
        # What encoders read may be no chat.
        if self.tokenizer.is_fast and not self.is_encoder_decoder and all(conversations):
            with suppress(TemplateError, TypeError, ValueError):  # told below, with advice
                return self._encoder(self._texts(rows))
        return [self.prompt(messages, shown) for messages, shown in rows]

    def _texts(self, rows: list[tuple[list[Message], list | None]]) -> list[str]:
        """The texts that [`~ModelPolicy.prompt`] encodes, of conversations with their tools."""
        texts: list[str] = []
        # A call renders any number of conversations, with the same tools: mostly there are none.
        for _, group in groupby(rows, key=lambda row: id(row[1])):
            part = list(group)
            texts += self.tokenizer.apply_chat_template(
                [self._read(messages) for messages, _ in part],
                tools=part[0][1],
                chat_template=self.chat_template or PLAIN_CHAT_TEMPLATE,
                add_generation_prompt=True,
                tokenize=False,
            )
        return texts

    def _read(self, messages: list[Message]) -> list[Message]:
        """The messages that the template gets."""
        if self.history_window is not None:
            messages = window_messages(messages, self.history_window)
        return [{**message, "role": model_role(message["role"])} for message in messages]

    def act(
        self,
        conversations: list[list[Message]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        **context: Any,
    ) -> list[Action]:
        """See [`Policy.act`]."""
        tools = context.get("tools") or [None] * len(conversations)
        prompts = self.prompts(conversations, tools)
        budgets = [self.budget(len(prompt), context.get("max_seq_len")) for prompt in prompts]
        actions = [
            Action("", OVERFLOW, num_prompt_tokens=len(prompt)) if budget < 1 else None
            for prompt, budget in zip(prompts, budgets, strict=True)
        ]
        # A row that is done goes on, unseen, until the others are: with learned positions past the last one, if the
        # others have more room.
        groups: dict[int, list[int]] = {}
        for i, budget in enumerate(budgets):
            if actions[i] is None:
                groups.setdefault(budget, []).append(i)
        parts = [
            rows[start : start + self.batch_size]
            for rows in groups.values()
            for start in range(0, len(rows), self.batch_size)
        ]
        training = [module for module in _modules(self.model) if module.training]
        # Setting a mode takes longer than rendering the conversations does.
        if training:
            self.model.eval()
        try:
            for part in parts:
                replies = self._generate(
                    [prompts[i] for i in part],
                    [stop_strings[i] for i in part],
                    [seeds[i] for i in part],
                    [budgets[i] for i in part],
                )
                for i, reply in zip(part, replies, strict=True):
                    actions[i] = reply
        finally:
            # One by one: `train` would take the parts along that were in evaluation mode, as frozen ones may be.
            for module in training:
                module.training = True
        return actions  # type: ignore[return-value]

    def identity(self) -> dict[str, Any]:
        """See [`Policy.identity`]. It names the model; whether its weights have changed since, it cannot tell."""
        config = self.model.config
        return {
            "id": config._name_or_path or type(self.model).__name__,
            "revision": getattr(config, "_commit_hash", None),  # set where it was loaded from the Hub
            "sampling": {**self.sampling, "max_new_tokens": self.max_new_tokens, "beta": self._beta()},
        }

    def _beta(self) -> float | None:
        return getattr(self.model.config, "beta", None) if self.beta is None else self.beta

    def budget(self, prompt_length: int, max_seq_len: int | None = None) -> int:
        """Number of tokens that a reply to a prompt of this length may have."""
        limits = [limit for limit in (max_seq_len, self._positions) if limit is not None]
        if self.is_encoder_decoder:
            # The reply is read by the decoder, which begins with its start token.
            room = [limit - 1 if prompt_length <= limit else 0 for limit in limits]
        else:
            room = [limit - prompt_length for limit in limits]
        return min([self.max_new_tokens, *room])

    def _generate(
        self,
        prompts: list[list[int]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        budgets: list[int],
    ) -> list[Action]:
        pad = self.tokenizer.pad_token_id
        pad = next((token for token in (pad, *self.eos_token_ids) if token is not None), 0)
        longest = max(map(len, prompts))
        input_ids = np.full((len(prompts), longest), pad, dtype=np.int64)
        mask = np.zeros_like(input_ids)
        for row, ids in enumerate(prompts):
            # The first token is at the first position of an encoder.
            place = slice(len(ids)) if self.is_encoder_decoder else slice(longest - len(ids), None)
            input_ids[row, place], mask[row, place] = ids, 1
        reply_start = 1 if self.is_encoder_decoder else longest
        sampler = RowSampler(seeds, reply_start, max(budgets), **self.sampling)
        stops = RowStops(self.tokenizer, reply_start, stop_strings, budgets, self.eos_token_ids)
        with torch.no_grad():
            self.model.generate(
                input_ids=torch.from_numpy(input_ids).to(self.model.device),
                attention_mask=torch.from_numpy(mask).to(self.model.device),
                generation_config=self._generation_config(max(budgets), pad),
                logits_processor=[sampler],
                stopping_criteria=[stops],
                **({} if self.beta is None else {"beta": self.beta}),
            )
        actions = []
        for row, logprobs in enumerate(sampler.logprobs()):
            ids = stops.token_ids[row]
            finish = stops.finishes[row] or "length"
            actions.append(
                Action(stops.text(row), finish, ids, logprobs[: len(ids)], len(ids), len(prompts[row]), prompts[row])
            )
        return actions

    def _generation_config(self, max_new_tokens: int, pad: int) -> Any:
        """The model's own, for its special tokens, with one way of choosing tokens: that of [`RowSampler`]."""
        config = copy.deepcopy(self.model.generation_config)
        config.update(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            eos_token_id=list(self.eos_token_ids) or None,
            return_dict_in_generate=False,
            stop_strings=None,
            **dict.fromkeys(("max_length", "temperature", "top_k", "top_p", "min_p", "typical_p")),
        )
        return config


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model. Its own `modules` takes longer than to render a conversation."""
    modules = [model]
    for module in modules:
        modules.extend(module.children())
    return modules


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The model's, and the tokenizer's: a reply that says one of them is over, whoever named it."""
    of_model = model.generation_config.eos_token_id
    ids = [*(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id]
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))
