# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Train any causal or encoder-decoder language model with ILQL on your own rewarded dialogues.

    python examples/ilql.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --dataset dialogues.jsonl \
        --output_dir outputs/my_policy --num_train_epochs 1 --head_type tied

`--dataset` is a `.jsonl`, `.json` or `.parquet` file, or a dataset of the Hub. `--config file.yaml` gives defaults for
every option.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from trl import TrlParser

from hf_qrl import ILQLConfig, ILQLTrainer


FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass
class ScriptArguments:
    """What is not a training argument."""

    model_name_or_path: str = field(metadata={"help": "Base model, or a model with ILQL heads to go on with."})
    dataset: str = field(metadata={"help": "A .jsonl, .json or .parquet file, or a dataset of the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset of the Hub."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Share of the rows to keep for evaluation."})
    head_type: str = field(default="mlp", metadata={"help": "Kind of the Q-heads: mlp, linear, tied or dueling."})
    num_q_heads: int = field(default=2, metadata={"help": "Number of Q-heads."})
    beta: float = field(default=1.0, metadata={"help": "Weight of the advantage in the policy."})
    policy_top_k: int | None = field(default=None, metadata={"help": "Support of the policy; all tokens by default."})
    dtype: str = field(default="float32", metadata={"help": "Floating point type of the language model."})


def load(name: str, split: str) -> Dataset:
    """Rows of a local file, or of a dataset of the Hub."""
    file_format = FILE_FORMATS.get(Path(name).suffix)
    if file_format is None:
        return load_dataset(name, split=split)
    return load_dataset(file_format, data_files=name, split="train")


def train(trainer_class: Any, script: Any, args: Any, head_arguments: dict[str, Any]) -> Any:
    """Trains a model with heads on the data that the options name, and saves it."""
    dataset, eval_dataset = load(script.dataset, script.dataset_split), None
    if script.eval_fraction > 0:
        parts = dataset.train_test_split(script.eval_fraction, seed=args.seed)
        dataset, eval_dataset = parts["train"], parts["test"]
    args.model_init_kwargs = {
        **head_arguments,
        "beta": script.beta,
        "policy_top_k": script.policy_top_k,
        "dtype": script.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = trainer_class(script.model_name_or_path, args, train_dataset=dataset, eval_dataset=eval_dataset)
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset)
    return trainer


def main(script: ScriptArguments, args: ILQLConfig) -> ILQLTrainer:
    return train(ILQLTrainer, script, args, {"head_type": script.head_type, "num_q_heads": script.num_q_heads})


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, ILQLConfig)).parse_args_and_config())
