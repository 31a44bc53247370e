# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Train an adapter (LoRA) with ILQL heads on any causal language model, on your own rewarded data.

    python examples/lora.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --dataset dialogues.jsonl \
        --output_dir outputs/my_adapter --num_train_epochs 1 --head_type tied --lora_r 16

The output directory holds the adapter and the heads, and names the model they go on. `--merge_to` also writes it all
as one model. `--load_in_4bit` trains on a quantised model (QLoRA; needs bitsandbytes and a GPU).
"""

from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import TrlParser

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer


@dataclass
class ScriptArguments:
    """What is not a training argument."""

    model_name_or_path: str = field(metadata={"help": "Base model, with or without ILQL heads."})
    dataset: str = field(metadata={"help": "A .jsonl file of rewarded dialogues or completions."})
    head_type: str = field(default="tied", metadata={"help": "Kind of the Q-heads: mlp, linear, tied or dueling."})
    beta: float = field(default=1.0, metadata={"help": "Weight of the advantage in the policy."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapter, in units of its rank."})
    lora_targets: str = field(default="all-linear", metadata={"help": "Layers to adapt, separated by commas."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Whether to quantise the base model."})
    merge_to: str | None = field(default=None, metadata={"help": "Where to save the merged model."})
    prompt: str = field(default="Hello", metadata={"help": "What to complete at the end."})


def main(script: ScriptArguments, args: ILQLConfig) -> PeftModel:
    targets = script.lora_targets.split(",")
    args.model_init_kwargs = {"head_type": script.head_type, "beta": script.beta, **(args.model_init_kwargs or {})}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    trainer = ILQLTrainer(
        model=script.model_name_or_path,
        args=args,
        train_dataset=load_dataset("json", data_files=script.dataset, split="train"),
        quantization_config=quantization if script.load_in_4bit else None,
        peft_config=LoraConfig(
            r=script.lora_r,
            lora_alpha=script.lora_alpha,
            target_modules=targets[0] if len(targets) == 1 and "-" in targets[0] else targets,
        ),
    )
    trainer.train()
    trainer.save_model()

    # The directory is all that is needed to use the policy; the base model is loaded by its name.
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    inputs = tokenizer(script.prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=True, beta=script.beta)
    print(tokenizer.decode(output[0]))
    if script.merge_to:
        model.merge_and_unload().save_pretrained(script.merge_to)
        tokenizer.save_pretrained(script.merge_to)
    return model


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, ILQLConfig)).parse_args_and_config())
