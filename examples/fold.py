# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Fold a trained policy into a plain language model, to be served by anything that serves its base model.

    python examples/random_walks.py --head_type linear --q_reduction mean
    python examples/fold.py --model outputs/random_walks --beta 16 --output_dir outputs/folded --prompt b

The Q-heads must be linear in the hidden state (`--head_type linear` or `tied`) and act by their mean, or be one.
"""

from dataclasses import dataclass, field

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, pipeline

from hf_qrl import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads


@dataclass
class ScriptArguments:
    """Options of the example."""

    model: str = field(metadata={"help": "A model with ILQL heads: a directory or a repository of the Hub."})
    output_dir: str = field(metadata={"help": "Where the plain model goes."})
    beta: float | None = field(default=None, metadata={"help": "Weight of the advantage; the model's own if unset."})
    prompt: str | None = field(default=None, metadata={"help": "Complete this with the plain model."})


def main(arguments: ScriptArguments) -> str | None:
    config = AutoConfig.from_pretrained(arguments.model)
    if not config.model_type.startswith("hf_qrl_"):
        raise ValueError(f"{arguments.model!r} is a {config.model_type!r} model without ILQL heads: nothing to fold.")
    encoder_decoder = config.is_encoder_decoder
    loader = AutoModelForSeq2SeqLMWithILQLHeads if encoder_decoder else AutoModelForCausalLMWithILQLHeads
    model = loader.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    folded = model.save_folded_policy(arguments.output_dir, arguments.beta, tokenizer)
    print(f"A plain {type(folded).__name__} is in {arguments.output_dir}")
    if arguments.prompt is None or encoder_decoder:
        return None
    plain = AutoModelForCausalLM.from_pretrained(arguments.output_dir)
    generator = pipeline("text-generation", plain, tokenizer=tokenizer)
    completion = generator(arguments.prompt, max_new_tokens=32, do_sample=False)[0]["generated_text"]
    print(completion)
    return completion


if __name__ == "__main__":
    (script_arguments,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    main(script_arguments)
