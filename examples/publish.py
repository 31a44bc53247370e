# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Push a trained policy to the Hub, load it from there and let it say something.

    python examples/publish.py --model outputs/my_policy --repo_id my_name/my_policy --prompt "Where is my parcel?"

Log in first (`hf auth login`), or set `HF_TOKEN`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import HfApi
from transformers import AutoConfig, AutoTokenizer
from trl import TrlParser

from hf_qrl import AutoModelForCausalLMWithILQLHeads


@dataclass
class ScriptArguments:
    """What to publish, and what to ask it."""

    model: str = field(metadata={"help": "Directory of a policy with its tokenizer, as a trainer saves it."})
    repo_id: str = field(metadata={"help": "Repository to push to, `owner/name`; made if there is none."})
    private: bool = field(default=False, metadata={"help": "Whether a new repository is private."})
    revision: str | None = field(
        default=None, metadata={"help": "Commit, tag or branch to load; by default this push."}
    )
    prompt: str = field(default="Hello!", metadata={"help": "What to complete, or to reply to."})
    max_new_tokens: int = field(default=64, metadata={"help": "Length of the completion."})
    beta: float | None = field(default=None, metadata={"help": "Weight of the advantage; the model's own by default."})


def push(script: ScriptArguments) -> str:
    """Pushes the files of the policy and returns the commit."""
    config = AutoConfig.from_pretrained(script.model)
    if not config.model_type.startswith("hf_qrl_"):
        raise ValueError(
            f"{script.model!r} is a {config.model_type!r} model without ILQL heads, and fresh ones would be "
            "published. Give a directory that a trainer of hf_qrl has saved."
        )
    # What cannot be loaded here is not published.
    AutoModelForCausalLMWithILQLHeads.from_pretrained(script.model)
    AutoTokenizer.from_pretrained(script.model)
    api = HfApi()
    repo_id = api.create_repo(script.repo_id, private=script.private or None, exist_ok=True).repo_id
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=Path(script.model),
        commit_message="Upload policy",
        allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py", "README.md"],
        ignore_patterns=["checkpoint-*"],
    )
    return commit.oid


def complete(script: ScriptArguments, revision: str) -> str:
    """Loads the policy from the Hub and returns what it makes of the prompt."""
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(script.repo_id, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained(script.repo_id, revision=revision)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": script.prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(script.prompt, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=script.max_new_tokens, do_sample=True, beta=script.beta)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(script: ScriptArguments) -> None:
    commit = push(script)
    print(f"Pushed {script.model} to {script.repo_id}, commit {commit}.")
    print(complete(script, script.revision or commit))


if __name__ == "__main__":
    main(*TrlParser(ScriptArguments).parse_args_and_config())
