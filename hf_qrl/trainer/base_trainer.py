# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What trainers here have in common besides their loss: the bare model, whole checkpoints, and the model card."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import CONFIG_NAME

from ..models.adapters import refuse_mixture, save_configuration
from ..models.configuration_ilql import KINDS_OF_HEADS
from .adapters import base_of
from .checkpoints import is_complete, last_complete_checkpoint, mark_incomplete
from .model_card import model_card
from .processes import begin_alike


# What cannot change between two parts of a run.
RESUMED_FIELDS = (
    *KINDS_OF_HEADS,
    *("num_q_heads", "q_reduction", "history_window", "reward_mean", "reward_std"),
)


class BaseTrainer(Trainer):
    """
    A [`~transformers.Trainer`] of a model with heads, or of an adapter around one, that resumes from whole checkpoints
    only and writes a model card beside everything it saves.
    """

    @property
    def bare_model(self) -> Any:
        """The model with its heads, without an adapter around it or what wraps it for several processes."""
        return base_of(self.accelerator.unwrap_model(self.model))

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        if training and self.is_fsdp_enabled:
            begin_alike(model, self.accelerator.device)
        return super()._wrap_model(model, training, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.Trainer.train`]; `resume_from_checkpoint=True` takes the last whole checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no complete checkpoint in {self.args.output_dir!r} to resume from.")
        elif resume_from_checkpoint and not os.path.isdir(resume_from_checkpoint):
            raise ValueError(f"There is no checkpoint directory {str(resume_from_checkpoint)!r}.")
        elif isinstance(resume_from_checkpoint, (str, os.PathLike)) and not is_complete(resume_from_checkpoint):
            raise ValueError(
                f"The checkpoint {str(resume_from_checkpoint)!r} was not written to its end; resume from an earlier "
                "one (`resume_from_checkpoint=True` finds the last that is whole)."
            )
        if resume_from_checkpoint:
            self._check_heads_of(Path(resume_from_checkpoint))
        if any(x.requires_grad for x in self.bare_model.language_model_parameters()) and self.model is self.bare_model:
            self.bare_model.trained_since_loading = True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_heads_of(self, checkpoint: Path) -> None:
        """Raises a `ValueError` for a checkpoint of other heads, some of which have tensors of the same shapes."""
        file = checkpoint / CONFIG_NAME
        if not file.is_file():
            return
        saved = json.loads(file.read_text(encoding="utf-8"))
        own = self.bare_model.config.to_dict()
        wrong = {
            name: f"{saved.get(name)!r}, not {own.get(name)!r}"
            for name in ("model_type", *RESUMED_FIELDS)
            if name in saved and saved[name] != own.get(name)
        }
        if wrong:
            raise ValueError(
                f"The checkpoint {str(checkpoint)!r} is of a model with other heads: {wrong}. Resume with the model "
                "that the run began with."
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            mark_incomplete(checkpoint)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # Every process writes its own; the trainer's state comes next, and says that the checkpoint is whole.
        self.accelerator.wait_for_everyone()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A tied weight is saved once, under its other name.
        tied = self.bare_model.all_tied_weights_keys
        missing = [key for key in load_result.missing_keys if key not in tied]
        if missing or load_result.unexpected_keys:
            raise ValueError(
                f"The checkpoint does not hold this model: {len(missing)} of its weights are missing "
                f"({', '.join(missing[:3])}) and {len(load_result.unexpected_keys)} are left over "
                f"({', '.join(load_result.unexpected_keys[:3])}). Training would go on from other weights."
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # What is pushed while training goes on is `args.output_dir`, into which the parent copies the weights alone.
        if self.args.hub_strategy != HubStrategy.END and self.is_world_process_zero():
            self.create_model_card()
            for code in Path(checkpoint_folder).glob("*.py"):
                shutil.copy(code, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        refuse_mixture(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        adapted = self.accelerator.unwrap_model(self.model)
        if isinstance(adapted, PeftModel) and self.args.should_save:
            # PEFT's own class, which a user may have used, does not.
            save_configuration(adapted, output_dir or self.args.output_dir)
        self.create_model_card(output_dir=output_dir)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        output_dir: str | None = None,
        license: str | None = None,
        language: str | list[str] | None = None,
    ) -> None:
        """
        Writes `README.md` from the template of `model_cards/`. `push_to_hub` hands its further arguments on to it.

        Args:
            model_name (`str`, *optional*): Name of the model; that of the output directory if not given.
            dataset_name (`str` or `list[str]`, *optional*): Names of the training data.
            tags (`str` or `list[str]`, *optional*): Further tags.
            output_dir (`str`, *optional*): Where to write; `args.output_dir` if not given.
            license (`str`, *optional*): License of the model, as the Hub abbreviates it.
            language (`str` or `list[str]`, *optional*): Languages of the model, by their codes.
        """
        if not self.is_world_process_zero():
            return
        directory = Path(output_dir or self.args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        card = model_card(
            self, model_name=model_name, dataset_name=dataset_name, tags=tags, license=license, language=language
        )
        (directory / "README.md").write_text(card, encoding="utf-8")


__all__ = ["BaseTrainer"]
