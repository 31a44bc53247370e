# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Loads a repository as someone would who has transformers and not hf_qrl, as the JSON file given as argument says:

- `repo_id`, `kwargs`: what `AutoModelForCausalLM.from_pretrained` gets;
- `input_ids`, `generate`: a prompt and the arguments of `generate`;
- `record`: file for the tensors, their classes and the generated tokens.
"""

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class NotInstalled(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "hf_qrl":
            raise ImportError(f"No module named {fullname!r}")


def main(spec: dict) -> None:
    sys.meta_path.insert(0, NotInstalled())
    model = AutoModelForCausalLM.from_pretrained(spec["repo_id"], **spec["kwargs"]).eval()
    tokens = model.generate(torch.tensor(spec["input_ids"]), **spec["generate"])
    tensors = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    classes = [type(model).__name__, type(model).__module__]
    torch.save(
        {"tensors": {k: x.detach() for k, x in tensors.items()}, "tokens": tokens, "class": classes}, spec["record"]
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
