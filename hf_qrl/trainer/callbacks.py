# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A table of what the policy says, with what it thinks of it."""

from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from ..models.heads import candidate_values


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
        if state.global_step % int(self.every or state.logging_steps) == 0 and state.is_world_process_zero:
            rows = self.sample()
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
        model = trainer.accelerator.unwrap_model(trainer.model)
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
                prompt = torch.tensor([row["input_ids"][: row["actions_ixs"][0] + 1]], device=model.device)
                out = model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=self.max_new_tokens,
                    do_sample=True,
                    pad_token_id=tokenizer.pad_token_id,
                )
                value, q = self.score(model, out, prompt.shape[1])
                text = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
                rows.append((tokenizer.decode(prompt[0], skip_special_tokens=True), text, value, q))
        model.train(training)
        return rows

    @staticmethod
    def score(model: Any, tokens: torch.Tensor, prompt_length: int) -> tuple[float, float]:
        """V before the first sampled token and the mean target Q of the sampled tokens of `tokens (1, n)`."""
        states = model.base.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, prompt_length - 1 : -1]
        taken = partial(candidate_values, candidates=tokens[0, prompt_length:, None])
        lm_weight = model.get_output_embeddings().weight
        q = model.heads.reduce([head(states, lm_weight, taken) for head in model.heads.target_q])
        mean, std = model.config.reward_mean, model.config.reward_std
        return model.heads.v(states[:1]).item() * std + mean, q.float().mean().item() * std + mean


__all__ = ["SampleTableCallback"]
