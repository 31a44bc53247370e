# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What language models with heads have in common, whatever the heads are and whatever the model is made of."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init

from .heads import ILQLHeads, QHead, QHeads
from .layers import BufferLinear, HeadLinear
from .saving import move_checkpoint
from .sharding import is_partitioned
from .value_head import ValueHeads


# What `from_pretrained` leaves on a model that is quantised or spread over devices, for those who train it.
PLACEMENT_ATTRIBUTES = {"is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "hf_device_map"}


# Which files of the Hub are meant, and how to get them.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class PreTrainedModelWithHeads(PreTrainedModel, GenerationMixin):
    """
    A language model with heads (`heads`), whatever it is made of and whatever they are: how it is loaded and saved.
    """

    # What to do about a checkpoint whose weights are not those of the model.
    loading_advice: ClassVar[str]

    heads: Any
    _keep_in_fp32_modules_strict = {"heads"}
    # This one is what quantisation leaves alone.
    _keep_in_fp32_modules = {"heads"}
    # The loss is a sum over actions divided by the number of actions of the whole optimizer step.
    accepts_loss_kwargs = True
    # Set by a trainer that changes the language model's weights: they are no longer those of the file they came from.
    trained_since_loading = False
    # Whether the heads were put on a language model, whose name is the model's then.
    made_from_base = False
    # Whether the policy has the language model for a prior, which has to be held to the data then.
    acts_by_language_model = True
    # The arguments of `forward` with which the policy is the language model itself.
    language_model_policy: ClassVar[dict[str, Any]] = {}

    @property
    def language_model(self) -> PreTrainedModel:
        """The language model that the heads are on."""
        return self

    def language_model_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but those of the heads."""
        heads = set(map(id, self.heads.parameters()))
        return (parameter for parameter in self.parameters() if id(parameter) not in heads)

    def hidden_states(self, **inputs: Any) -> torch.Tensor:
        """
        The inputs of the LM head, `(B, n, d)`, without the cost of the logits. `inputs` are those of the language
        model; rows are padded on the right.
        """
        raise NotImplementedError

    def _state_after(self, input_ids: Any, attention_mask: Any) -> torch.Tensor | None:
        """The last state `(B, d)` of rows, where there are rows; without gradients."""
        if input_ids is None or attention_mask is None:
            return None
        last = (attention_mask.sum(1) - 1).clamp(min=0)
        with torch.no_grad():
            states = self.hidden_states(input_ids=input_ids, attention_mask=attend_somewhere(attention_mask))
        return states[torch.arange(len(last), device=last.device), last]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Reached for what a checkpoint lacks; the constructor initialises fresh heads itself (targets are copies of
        # the online heads, which no leaf can know), and `from_pretrained` sees to heads that are missing.
        if isinstance(module, (HeadLinear, BufferLinear, QHead)):
            for tensor in (module.weight, module.bias):
                if tensor is not None:
                    init.zeros_(tensor)
        else:
            super()._init_weights(module)

    def _take_over(self, base: PreTrainedModel) -> None:
        """What a model whose heads were put on a live language model has from it besides its modules."""
        self.heads.to(device=base.device)
        if any(map(is_partitioned, base.parameters())):
            # ZeRO-3 takes parameters of one type, and keeps the float32 numbers that its optimizer steps on itself.
            for parameter in self.heads.parameters():
                parameter.data = parameter.data.to(base.dtype)
        self.generation_config = base.generation_config
        self.made_from_base = True
        for name in PLACEMENT_ATTRIBUTES & vars(base).keys():
            setattr(self, name, getattr(base, name))
        self.train(base.training)

    # ------------------------------------------------------------------------------------------ loading and saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            `ValueError`: if weights are missing from the checkpoint or have another shape, or if it has heads that are
            not in the configuration.
        """
        return_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        faults = {
            "are missing": model._complete(set(info["missing_keys"])),
            "have another shape": [
                key for key, _, _ in info["mismatched_keys"] if key.startswith("heads.") or not ignore_mismatched_sizes
            ],
            "of heads are left over": [key for key in info["unexpected_keys"] if key.startswith("heads.")],
        }
        if any(faults.values()):
            listing = "; ".join(
                f"{len(keys)} weights {what} ({', '.join(sorted(keys)[:3])})" for what, keys in faults.items() if keys
            )
            raise ValueError(
                f"The checkpoint {str(pretrained_model_name_or_path)!r} does not hold this {cls.__name__}: {listing}. "
                f"{cls.loading_advice}"
            )
        return (model, info) if return_info else model

    def _complete(self, missing: set[str]) -> set[str]:
        """Makes up for weights that a checkpoint may lack; returns the names of those it may not lack."""
        return missing

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """
        As [`~transformers.PreTrainedModel.save_pretrained`]. Files are written beside the old ones and moved over
        them when complete, so that a kill leaves the checkpoint that was there.
        """
        if kwargs.get("state_dict") is None and any(map(is_partitioned, self.parameters())):
            raise ValueError(
                "The weights are partitioned over processes (DeepSpeed ZeRO-3 or FSDP2), and this process would save "
                "its part of them. Use `trainer.save_model(...)`, or pass the `state_dict` that "
                "`accelerator.get_state_dict` gathers."
            )
        # Under the names the model has, not those of older checkpoints of its language model: a trainer that resumes
        # reads a checkpoint without translating them.
        kwargs.setdefault("save_original_format", False)
        if not self.is_remote_code():
            # That of a repository with code, which is not saved along.
            self.config.__dict__.pop("auto_map", None)
        directory = Path(save_directory)
        if directory.is_file() or kwargs.get("is_main_process", True) is False:
            return super().save_pretrained(save_directory, *args, **kwargs)
        directory.mkdir(parents=True, exist_ok=True)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", directory.name)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as staging:
            super().save_pretrained(staging, *args, **kwargs)
            move_checkpoint(Path(staging), directory, kwargs.get("variant"))

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        # transformers enters itself as the library of a card it writes, and cannot load the model without its code.
        path = Path(working_dir) / "README.md"
        card = ModelCard.load(path)
        if card.data.library_name == "transformers" and not self.is_remote_code():
            card.data.library_name = "hf_qrl"
            card.save(path)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


def check_bare(base: PreTrainedModel) -> None:
    """Raises a `ValueError` for a live model that has heads or adapters already."""
    heads = next((module for module in base.modules() if isinstance(module, (QHeads, ValueHeads))), None)
    if heads is not None:
        kinds = {ILQLHeads: "ILQL heads", QHeads: "Q-learning heads", ValueHeads: "a value head"}
        raise ValueError(
            f"The model already has {kinds[type(heads)]}. Pass its language model (`model.base`) to put others on it."
        )
    if any(type(module).__module__.startswith("peft.") for module in base.modules()):
        raise ValueError(
            f"The {type(base).__name__} has adapters injected into it, which would not be found again after saving. "
            "Put the heads on the bare model, and the adapter on the result (`peft_config=` of the trainer)."
        )


def attend_somewhere(mask: torch.Tensor) -> torch.Tensor:
    """A row without a next state attends to its padding, for attention over nothing is NaN; it is not used."""
    mask = mask.clone()
    mask[:, 0] = 1
    return mask


__all__ = ["PreTrainedModelWithHeads"]
