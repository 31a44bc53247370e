# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
PPO in an environment of your own: write a game as a `TextEnv`, and train a language model by playing it.

    python examples/ppo.py --output_dir outputs/ppo

rides an elevator: the player reads where it is and where it should go, and says "up" or "down". By default the player
is a Llama of two small layers from scratch, which learns it in a minute; `--model_name_or_path` takes any language
model instead. Every option of `PPOConfig` is an option here (`--max_steps 200 --kl_coef 0.1 --learning_rate 1e-5`).
"""

import random
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import TrlParser

from hf_qrl import PPOConfig, PPOTrainer, TextEnv, evaluate_policy
from hf_qrl.data.episodes import PLAIN_CHAT_TEMPLATE
from hf_qrl.rollouts import ModelPolicy


NUM_FLOORS = 5


class Elevator(TextEnv):
    """Reach a floor: -0.1 for every ride, and 1 for arriving. What is neither up nor down goes nowhere."""

    stop_strings = ["up", "down"]

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.floor, self.goal = random.Random(seed).sample(range(NUM_FLOORS), 2)
        return self._look(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.floor = min(max(self.floor + {"up": 1, "down": -1}.get(action, 0), 0), NUM_FLOORS - 1)
        arrived = self.floor == self.goal
        return self._look(), (1.0 if arrived else 0.0) - 0.1, arrived, False, {"success": arrived}

    def legal_actions(self) -> list[str]:
        return ["up", "down"]

    def _look(self) -> str:
        return f"Floor {self.floor}, go to {self.goal}: "


def small_player(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama from scratch, and a tokenizer whose tokens are the words of the game."""
    words = ["<pad>", "<eos>", "<unk>", "Floor", "go", "to", "up", "down", " ", ",", ":", *map(str, range(NUM_FLOORS))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"up|down|Floor|go|to|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=PLAIN_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,  # the usual 0.02 is made for wider models
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


@dataclass
class ScriptArguments:
    """What is not a training argument."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Language model; by default a small one."})
    test_episodes: int = field(default=200, metadata={"help": "Episodes to play in the end."})


def main(script: ScriptArguments, args: PPOConfig) -> dict[str, float]:
    model: Any = script.model_name_or_path
    tokenizer = None
    if model is None:
        model, tokenizer = small_player(args.seed)
    trainer = PPOTrainer(model, args, environment=Elevator, processing_class=tokenizer)
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model()
    policy = ModelPolicy(
        trainer.bare_model, trainer.processing_class, max_new_tokens=args.max_completion_length, do_sample=False
    )
    result = evaluate_policy(policy, Elevator, script.test_episodes, max_turns=args.max_turns, progress=False)
    print(f"Greedy: return {result.mean_return.mean:.3f}, success {result.success_rate:.3f}")
    print(f"The model is in {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub()
    return {"return": result.mean_return.mean, "success": result.success_rate}


DEFAULTS = {
    "output_dir": "outputs/ppo",
    "max_steps": 240,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "ppo_epochs": 8,
    "per_device_train_batch_size": 256,
    "episodes_per_rollout": 64,
    "max_turns": 20,
    "max_completion_length": 1,
    "history_window": 1,
    "gamma": 0.95,
    "discount_on": "utterance",
    "vf_coef": 0.5,
    "entropy_coef": 0.01,
    "kl_coef": 0.0,  # there is nothing in a model from scratch to stay close to
    "save_strategy": "no",
    "report_to": "none",
}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PPOConfig))
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
