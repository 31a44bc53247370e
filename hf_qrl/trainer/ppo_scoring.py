# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Log-probabilities and values of sampled tokens, under the policy as it sampled them and under the reference."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from ..data import collate_ppo
from ..data.ppo_types import PPORLElement
from ..losses.ppo import score_tokens_from_states
from ..models.heads import gather_states
from .ppo_rows import model_inputs


class Score(NamedTuple):
    """
    What is known of the tokens of a response, each `(R,)`, float32 on the CPU.

    Args:
        logprobs (`torch.Tensor`): Log-probabilities under the policy.
        values (`torch.Tensor`): Values of the states that they were sampled in.
        entropy (`torch.Tensor`): Entropy of the policy in these states.
        ref_logprobs (`torch.Tensor`): Log-probabilities under the reference policy; the policy's own without one.
    """

    logprobs: torch.Tensor
    values: torch.Tensor
    entropy: torch.Tensor
    ref_logprobs: torch.Tensor


class Scorer:
    """
    Evaluates responses in the forward of the model in training, every process a share of them.

    Args:
        trainer ([`PPOTrainer`]): The trainer.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def scores(self, elements: Sequence[PPORLElement]) -> list[Score]:
        """The scores of all elements, the same on every process."""

        def evaluate(batch: list[PPORLElement]) -> list[Score]:
            trainer, moved = self.trainer, collate_ppo(batch, self.trainer.pad_token_id)
            moved = trainer.to_device(moved)
            inputs, positions = model_inputs(moved, trainer.pad_token_id, trainer.decoder_start_token_id)

            def score(hidden_states, heads, lm_head, next_state):
                states = gather_states(hidden_states, positions)
                logprobs, entropy = score_tokens_from_states(states, lm_head, moved, trainer.args.temperature)
                return torch.stack([logprobs, heads.v(states).to(logprobs.dtype), entropy])

            def ref_score(hidden_states, heads, lm_head, next_state):
                states = gather_states(hidden_states, positions)
                return score_tokens_from_states(states, lm_head, moved, trainer.args.temperature)[0]

            rows = trainer.model_wrapped(**inputs, loss_fn=score).loss
            reference = rows[0] if trainer.reference is None else trainer.reference(inputs, ref_score)
            rows = torch.cat([rows, reference.to(rows.dtype).unsqueeze(0)]).float().cpu()
            return [Score(*rows[:, i, : len(element.response_tensor)]) for i, element in enumerate(batch)]

        return self._in_shares(elements, evaluate)

    def values(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """The value of the state after each prompt and what was said after it, the same on every process."""
        elements = [_unfinished(prompt, said) for prompt, said in texts]

        def evaluate(batch: list[PPORLElement]) -> list[float]:
            trainer = self.trainer
            moved = trainer.to_device(collate_ppo(batch, trainer.pad_token_id))
            inputs, positions = model_inputs(moved, trainer.pad_token_id, trainer.decoder_start_token_id)
            values = trainer.model_wrapped(
                **inputs, loss_fn=lambda states, heads, lm_head, next_state: heads.v(gather_states(states, positions))
            ).loss
            return [values[i, len(element.response_tensor) - 1].item() for i, element in enumerate(batch)]

        return self._in_shares(elements, evaluate)

    @torch.no_grad()
    def _in_shares(self, elements: Sequence[PPORLElement], evaluate: Any) -> list[Any]:
        """`evaluate` on batches of about one length, in turns of the processes, which all make as many calls."""
        trainer, size = self.trainer, self.trainer.args.generation_batch_size
        order = sorted(
            range(len(elements)), key=lambda i: len(elements[i].query_tensor) + len(elements[i].response_tensor)
        )
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        own = batches[trainer.args.process_index :: trainer.args.world_size]
        rounds = -(-len(batches) // trainer.args.world_size)
        training = trainer.model_wrapped.training
        trainer.model_wrapped.eval()
        found: list[tuple[int, Any]] = []
        for i in range(rounds):
            batch = own[i] if i < len(own) else batches[0]
            results = evaluate([elements[j] for j in batch])
            if i < len(own):
                found += zip(batch, results, strict=True)
        trainer.model_wrapped.train(training)
        if trainer.args.world_size > 1:
            found = gather_object(found)
        return [result for _, result in sorted(found, key=lambda pair: pair[0])]


def _unfinished(prompt: list[int], said: list[int]) -> PPORLElement:
    """A response that goes on: by one token, which is not read."""
    zeros = torch.zeros(len(said) + 1)
    return PPORLElement(torch.tensor(prompt), torch.tensor([*said, 0]), zeros, zeros, zeros)


__all__ = ["Score", "Scorer"]
