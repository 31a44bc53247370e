# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Train a Llama, or any other language model, by autoregressive Q-learning on your own rewarded dialogues.

    python examples/qrlhf.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --dataset dialogues.jsonl \
        --output_dir outputs/my_policy --num_train_epochs 1

A Llama gets a dueling Q-head of its own and acts by its Q-values (`--policy q`) or by the language model with them
(`--policy lm --beta 4`); another model gets the same head as a model with ILQL heads, and acts in the second way.
`--dataset` is a `.jsonl`, `.json` or `.parquet` file, or a dataset of the Hub. `--config file.yaml` gives defaults for
every option.
"""

from dataclasses import dataclass, field

from ilql import train
from trl import TrlParser

from hf_qrl import QRLHFConfig, QRLHFTrainer


@dataclass
class ScriptArguments:
    """What is not a training argument."""

    model_name_or_path: str = field(metadata={"help": "Base model, or a model with a Q-head to go on with."})
    dataset: str = field(metadata={"help": "A .jsonl, .json or .parquet file, or a dataset of the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset of the Hub."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Share of the rows to keep for evaluation."})
    policy: str | None = field(default=None, metadata={"help": "What a Llama acts by, q (the default) or lm."})
    beta: float = field(default=1.0, metadata={"help": "Weight of the advantage in the policy lm."})
    policy_top_k: int | None = field(default=None, metadata={"help": "Support of the policy; all tokens by default."})
    dtype: str = field(default="float32", metadata={"help": "Floating point type of the language model."})


def main(script: ScriptArguments, args: QRLHFConfig) -> QRLHFTrainer:
    return train(QRLHFTrainer, script, args, {} if script.policy is None else {"policy": script.policy})


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, QRLHFConfig)).parse_args_and_config())
