# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A check before training, and tables of what the policy says during it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from ..models.heads import candidate_values
from ..models.lm_head import LMHead


class LMHeadCheckCallback(TrainerCallback):
    """
    Compares, before the first step, the logits that the loss computes in chunks with those of the model itself. They
    differ if the model does something between its last hidden state and its logits that hf_qrl does not know.

    Args:
        trainer ([`ILQLTrainer`]): The trainer.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        # Through the wrapped model, as in training: only there are the weights of every layout of processes whole.
        model, bare = trainer.model_wrapped, trainer.bare_model
        row = trainer.data_collator([next(iter(trainer.train_dataset))])
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        inputs = trainer._prepare_inputs({name: row[name][:, :16] for name in names if name in row})
        training = model.training
        model.eval()
        logits = model(**inputs, **bare.language_model_policy).logits.float()
        computed = model(**inputs, loss_fn=dense_logits).loss
        model.train(training)
        kept = logits > -torch.inf  # of the support of the policy
        difference = (computed - logits)[kept].abs().max().item()
        scale = max(1.0, logits[kept].abs().max().item())
        if difference > (1e-3 if bare.dtype == torch.float32 and not trainer.accelerator.native_amp else 5e-2) * scale:
            raise ValueError(
                f"The logits of {type(bare.language_model).__name__} are not the projection of its last hidden state "
                f"(they differ by {difference:.3g}). Training would optimise something else than "
                "what the model decodes; this architecture is not supported."
            )


def dense_logits(hidden_states: torch.Tensor, heads: Any, lm_head: LMHead, next_state: Any) -> torch.Tensor:
    """The logits `(B, n, V)` as the losses see them."""

    def evaluate(z, weight, bias, offset, softcap):
        values = torch.nn.functional.linear(z, weight, bias).float()
        return values if softcap is None else softcap * torch.tanh(values / softcap)

    return lm_head(hidden_states, evaluate)


class SampleTableCallback(TrainerCallback):
    """
    Prints completions sampled from the policy for a few prompts of the data, with V in the first state and the mean
    target Q of the sampled tokens, in the units of the rewards.

    Args:
        trainer ([`ILQLTrainer`]): The trainer.
        every (`int`, *optional*): Number of optimizer steps between two tables; between two logs if not given.
        num_samples (`int`): Number of prompts.
        max_new_tokens (`int`): Longest completion.
    """

    def __init__(self, trainer: Any, every: int | None, num_samples: int, max_new_tokens: int):
        self.trainer, self.every = trainer, every
        self.num_samples, self.max_new_tokens = num_samples, max_new_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % int(self.every or state.logging_steps) == 0:
            # Every process samples, for the weights may be partitioned over all of them; one prints.
            rows = self.sample()
            if not state.is_world_process_zero:
                return
            table = Table(title=f"Completions at step {state.global_step}", show_lines=True)
            for column in ("Prompt", "Completion", "V (start)", "Q (mean)"):
                table.add_column(column, overflow="fold")
            for prompt, completion, value, q in rows:
                table.add_row(prompt, completion, f"{value:.3f}", f"{q:.3f}")
            Console().print(table)

    @torch.no_grad()
    def sample(self) -> list[tuple[str, str, float, float]]:
        """`(prompt, completion, V, mean Q)` for each prompt; leaves the state of the random generators as it was."""
        trainer = self.trainer
        model = trainer.bare_model
        tokenizer = trainer._tokenizer  # of a processor too
        dataset = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        training = model.training
        model.eval()
        rows = []
        devices = [] if model.device.type == "cpu" else [model.device]
        with torch.random.fork_rng(devices, device_type=model.device.type if devices else "cuda"):
            torch.manual_seed(trainer.args.seed)
            for _, row in zip(range(self.num_samples), dataset, strict=False):
                seq2seq = model.config.is_encoder_decoder
                ids = row["input_ids"] if seq2seq else row["input_ids"][: row["actions_ixs"][0] + 1]
                prompt = torch.tensor([ids], device=model.device)
                out = model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=self.max_new_tokens,
                    do_sample=True,
                    pad_token_id=tokenizer.pad_token_id,
                )
                # What an encoder-decoder model returns is the decoder's: its start token and the completion.
                start = 1 if seq2seq else prompt.shape[1]
                value, q = self.score(model, out, start, trainer.state_values, prompt if seq2seq else None)
                text = tokenizer.decode(out[0, start:], skip_special_tokens=True)
                rows.append((tokenizer.decode(prompt[0], skip_special_tokens=True), text, value, q))
        model.train(training)
        return rows

    @staticmethod
    def score(
        model: Any,
        tokens: torch.Tensor,
        prompt_length: int,
        state_values: Callable[[torch.Tensor, Any, LMHead], torch.Tensor],
        encoder_input_ids: torch.Tensor | None = None,
    ) -> tuple[float, float]:
        """
        V before the first sampled token, which `state_values(states, heads, lm_head)` tells, and the mean target Q of
        the sampled tokens of `tokens (1, n)`; with `encoder_input_ids` the tokens are the decoder's.
        """

        def values(hidden_states, heads, lm_head, next_state):
            states = hidden_states[:, prompt_length - 1 : -1]
            taken = partial(candidate_values, candidates=tokens[:, prompt_length:, None])
            q = heads.reduce([head.on_language_model(states, lm_head, taken) for head in heads.target_q])
            return torch.stack([state_values(states[0, :1], heads, lm_head)[0], q.mean()])

        inputs = {"input_ids": tokens}
        if encoder_input_ids is not None:
            inputs = {"input_ids": encoder_input_ids, "decoder_input_ids": tokens}
        value, q = model(**inputs, loss_fn=values).loss.tolist()
        mean, std = model.config.reward_mean, model.config.reward_std
        return value * std + mean, q * std + mean


class EpisodeTableCallback(TrainerCallback):
    """
    Prints the first turns of the latest rollout: what the policy read last, what it said, what it earned.

    Args:
        trainer ([`PPOTrainer`]): The trainer.
        every (`int`, *optional*): Number of optimizer steps between two tables; between two logs if not given.
        num_samples (`int`): Number of episodes.
    """

    def __init__(self, trainer: Any, every: int | None, num_samples: int):
        self.trainer, self.every, self.num_samples = trainer, every, num_samples

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = state.global_step % int(self.every or state.logging_steps) == 0
        if not due or not state.is_world_process_zero:
            return
        table = Table(title=f"Episodes at step {state.global_step}", show_lines=True)
        for column in ("Prompt", "Completion", "Reward", "Return"):
            table.add_column(column, overflow="fold")
        for row in self.trainer.latest_episodes[: self.num_samples]:
            turn = next(i for i, message in enumerate(row["messages"]) if message["role"] == "assistant")
            prompt = "\n".join(str(message["content"]) for message in row["messages"][:turn])
            reply = str(row["messages"][turn]["content"])
            table.add_row(prompt, reply, f"{row['turn_rewards'][0]:.3f}", f"{row['return']:.3f}")
        Console().print(table)


__all__ = ["EpisodeTableCallback", "LMHeadCheckCallback", "SampleTableCallback"]
