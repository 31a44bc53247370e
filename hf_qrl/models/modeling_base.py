# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What models with Q-heads have in common, and those with ILQL heads: all but the signature of `forward`."""

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from .configuration_ilql import KINDS_OF_HEADS, ILQLConfigBase
from .folding import fold_policy, save_folded_policy
from .heads import BufferLinear, HeadLinear, ILQLHeads, QHead, QHeads, candidate_values, gather_states
from .lm_head import LMHead, capture_input
from .saving import move_checkpoint
from .sharding import gathered, is_partitioned


# What `from_pretrained` leaves on a model that is quantised or spread over devices, for those who train it.
PLACEMENT_ATTRIBUTES = {"is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "hf_device_map"}


# Which files of the Hub are meant, and how to get them.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class QPreTrainedModel(PreTrainedModel, GenerationMixin):
    """
    A language model with Q-heads (`heads`), whatever it is made of: how it is loaded, saved and generated with.
    """

    # What to do about a checkpoint whose weights are not those of the model.
    loading_advice: ClassVar[str]
    # Arguments of `forward` that override the configuration's policy.
    policy_arguments: ClassVar[tuple[str, ...]] = ("beta",)

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
    language_model_policy: ClassVar[dict[str, Any]] = {"beta": 0.0}

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
            self.heads.update_targets(1.0)
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

    def _resize_heads(self) -> None:
        """Brings the heads to the size of the output embedding."""
        vocab_size = self.get_output_embeddings().out_features
        for head in (*self.heads.q, *self.heads.target_q):
            with gathered(head.parameters(), modify=True):
                head.resize(vocab_size)

    # -------------------------------------------------------------------------------------------------- generation

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.GenerationMixin.generate`]; `beta=` (and what else the configuration says of the policy and
        `forward` takes) overrides the configuration for this call.
        """
        beta = kwargs.get("beta")
        if beta is not None and not (isinstance(beta, (int, float)) and math.isfinite(beta)):
            raise ValueError(f"`beta` must be a finite number, the same for all rows, got {beta!r}.")
        for name in self.policy_arguments:
            if kwargs.get(name) is not None and kwargs.get("guidance_scale") is not None:
                raise ValueError(
                    f"Guidance runs the model a second time without `{name}`; set `model.config.{name}` instead."
                )
            if kwargs.get(name) is not None and kwargs.get("assistant_model") is not None:
                raise ValueError(
                    f"Assisted decoding hands every argument to the draft model too, which has no `{name}`; set "
                    f"`model.config.{name}` instead."
                )
        if self.config.policy_top_k is not None:
            processors = kwargs.get("logits_processor") or []
            kwargs["logits_processor"] = LogitsProcessorList([*processors, SupportCheck()])
        return super().generate(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.GenerationMixin.generate_batch`], with the policy of the configuration."""
        for name in self.policy_arguments:
            if name in kwargs:
                raise ValueError(f"`generate_batch` would ignore `{name}`; set `model.config.{name}` instead.")
        return super().generate_batch(*args, **kwargs)


class ILQLPreTrainedModel(QPreTrainedModel, GenerationMixin):
    """
    A language model (`base`) and the heads of ILQL on the inputs of its LM head (`heads`).
    """

    # The Auto class of the language model, and what it is.
    base_auto_class: ClassVar[Any]
    kind: ClassVar[str]

    loading_advice = (
        "If it is a plain language model, use `AutoModelFor...WithILQLHeads.from_pretrained`, which puts fresh heads "
        "on it; if it has other heads, load it with the configuration it was saved with."
    )

    base_model_prefix = "base"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: ILQLConfigBase, base: PreTrainedModel | None = None):
        super().__init__(config)
        config.validate_heads()
        if base is None:
            base = self.base_auto_class.from_config(config.text_config)
        self.base = base
        output: Any = base.get_output_embeddings()
        if output is None:
            raise ValueError(
                f"{type(base).__name__} has no output embeddings to take the width of the heads from; ILQL heads need "
                "a model with a language modelling head."
            )
        self.heads = ILQLHeads(
            hidden_size=output.in_features,
            vocab_size=output.out_features,
            head_type=config.head_type,
            head_stem=str(config.head_stem),
            head_expansion=config.head_expansion,
            num_q_heads=config.num_q_heads,
            q_reduction=config.q_reduction,
        )
        self.post_init()
        self.add_model_tags(["hf_qrl", "ilql"])
        if not self.heads.v.projection.weight.is_meta:  # as it is where a checkpoint is about to be loaded
            self.heads.reset(str(config.head_init))

    # ------------------------------------------------------------------------------------------------ construction

    @classmethod
    def check_kind(cls, config: PreTrainedConfig, name: str) -> None:
        """Raises a `ValueError` if a model of this configuration is encoder-decoder and the class is not, or so."""
        kinds = {False: ("causal", "CausalLM"), True: ("an encoder-decoder", "Seq2SeqLM")}
        kind, suffix = kinds[bool(config.is_encoder_decoder)]
        if kind != cls.kind:
            raise ValueError(
                f"{name} is {kind}, and {cls.__name__} takes models that are {cls.kind}. Use "
                f"`AutoModelFor{suffix}WithILQLHeads`."
            )

    @classmethod
    def from_base(cls, base: PreTrainedModel, **head_arguments: Any) -> Any:
        """
        Puts fresh heads on a live language model, which is used as it is (not copied).

        Args:
            base (`PreTrainedModel`): The language model.
            head_arguments: Fields of the configuration ([`ILQLCausalLMConfig`]).
        """
        if not isinstance(base, PreTrainedModel):
            raise ValueError(
                f"ILQL heads go on a `PreTrainedModel`, got {type(base).__name__}. If it is an adapter: put the heads "
                "on its base model and the adapter on the result (`peft_config=` of the trainer does it), or merge it "
                "first (`merge_and_unload()`)."
            )
        check_bare(base)
        cls.check_kind(base.config, type(base).__name__)
        # The constructor initialises modules that are not marked as initialised, such as an embedding that was
        # resized or replaced since loading.
        for module in base.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
        config = cls.config_class(
            text_config=base.config, dtype=base.dtype, name_or_path=base.name_or_path, **head_arguments
        )
        model = cls(config, base=base)
        model._take_over(base)
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.PreTrainedModel.from_pretrained`], for a checkpoint that has its heads.

        Raises:
            `ValueError`: if weights are missing from the checkpoint or have another shape, or if it has heads that are
            not in the configuration.
        """
        cls._check_kind_of_heads(pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _check_kind_of_heads(cls, name: str | os.PathLike, kwargs: dict[str, Any]) -> None:
        """Raises a `ValueError` if other heads are asked for than were saved."""
        asked, config = kwargs, kwargs.get("config")
        if isinstance(config, ILQLConfigBase):
            beside = [key for key in ILQLConfigBase.__annotations__ if key in kwargs]
            if beside:
                raise ValueError(f"{beside} are set in the configuration that is passed, not beside it.")
            asked = {key: getattr(config, key) for key in KINDS_OF_HEADS}
        if all(asked.get(key) is None for key in KINDS_OF_HEADS):
            return
        loading = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        try:
            saved = cls.config_class.from_pretrained(name, **loading)
        except OSError:
            return  # there are weights without a configuration, and the one that is passed is all there is
        saved.check_kind_of_heads(asked, str(name))

    # -------------------------------------------------------------------------------------------------- embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """
        Resizes the embeddings and the Q-heads; in each Q-head a new token starts as the mean of the old ones.
        """
        config = self.base.config.get_text_config()
        # Flan-T5 says that it is tied and is not. transformers would tie it here, and its own LM head would be lost.
        apart = self.get_output_embeddings().weight is not self.get_input_embeddings().weight
        tied, config.tie_word_embeddings = config.tie_word_embeddings, config.tie_word_embeddings and not apart
        try:
            embeddings = self.base.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        finally:
            config.tie_word_embeddings = tied
        self._resize_heads()
        return embeddings

    # ----------------------------------------------------------------------------------------------------- forward

    @property
    def language_model(self) -> PreTrainedModel:
        return self.base

    def _refuse_labels(self, labels: Any) -> None:
        if labels is not None:
            raise ValueError(
                "A model with ILQL heads takes no `labels`: train it with `ILQLTrainer`, or train the language model "
                "alone through `model.base`."
            )

    def _run_base(
        self, output_values: bool, beta: float | None, states_ixs: Any, actions_ixs: Any, **inputs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Runs the language model; returns its output, and `logits` of the policy or `logits` and values."""
        kept = inputs.get("logits_to_keep", 0)
        if (states_ixs is not None or actions_ixs is not None) and not (isinstance(kept, int) and kept == 0):
            raise ValueError(
                "`states_ixs` and `actions_ixs` are positions of the whole row, of which `logits_to_keep` leaves a "
                "part. Leave out one of them."
            )
        with capture_input(self.get_output_embeddings()) as captured:
            base_output = self.base(return_dict=True, **inputs)
        hidden_states, logits = captured[0], base_output.logits
        if not output_values:
            return base_output, {"logits": self._policy_logits(logits, hidden_states, beta)}
        states = hidden_states if states_ixs is None else gather_states(hidden_states, states_ixs)
        value, qs, target_qs = LMHead(self.base).lend(
            hidden_states if actions_ixs is None else gather_states(hidden_states, actions_ixs),
            lambda action_states, lm_weight: self.heads(action_states, states, lm_weight),
        )
        return base_output, {"logits": logits, "value": value, "qs": qs, "target_qs": target_qs}

    def _policy_logits(self, logits: torch.Tensor, hidden_states: torch.Tensor, beta: float | None) -> torch.Tensor:
        """`logits + beta * (Q - V)` on the support of the policy, -inf elsewhere."""
        beta = self.config.beta if beta is None else beta

        def score(logits: torch.Tensor, evaluate: Callable[..., Any] | None) -> torch.Tensor:
            if beta == 0:
                return logits
            lm_head = LMHead(self.base)
            qs = [head.on_language_model(hidden_states, lm_head, evaluate) for head in self.heads.target_q]
            return logits + beta * (self.heads.reduce(qs) - self.heads.v(hidden_states).unsqueeze(-1))

        return on_support(logits, self.config.policy_top_k, score)

    def hidden_states(self, **inputs: Any) -> torch.Tensor:
        """
        The inputs of the LM head, `(B, n, d)`, without the cost of the logits. `inputs` are those of the language
        model under the heads; rows are padded on the right.
        """
        with capture_input(self.get_output_embeddings(), project=False) as captured:
            self.base(use_cache=False, return_dict=True, **inputs)
        return captured[0]

    def _loss(self, loss_fn: Callable[..., torch.Tensor], hidden_states: torch.Tensor, next_state: Any) -> Any:
        return loss_fn(hidden_states, self.heads, LMHead(self.base), next_state)

    # -------------------------------------------------------------------------------------------------- generation

    def fold_policy(self, beta: float | None = None) -> Any:
        """
        The policy at `beta` (`config.beta` if not given) as a plain language model: a copy of `base` with other output
        embeddings, which decodes the same with `transformers` alone, or in any server, at no extra cost. See
        [`~models.folding.fold_policy`] for what folds.
        """
        return fold_policy(self, beta)

    def save_folded_policy(
        self, save_directory: str | os.PathLike, beta: float | None = None, processing_class: Any = None
    ) -> Any:
        """Saves [`fold_policy`]'s model with its generation configuration, a card and a tokenizer; returns it."""
        return save_folded_policy(self, save_directory, beta, processing_class)


def check_bare(base: PreTrainedModel) -> None:
    """Raises a `ValueError` for a live model that has heads or adapters already."""
    heads = next((module for module in base.modules() if isinstance(module, QHeads)), None)
    if heads is not None:
        raise ValueError(f"The model already has {'ILQL' if isinstance(heads, ILQLHeads) else 'Q-learning'} heads.")
    if any(type(module).__module__.startswith("peft.") for module in base.modules()):
        raise ValueError(
            f"The {type(base).__name__} has adapters injected into it, which would not be found again after saving. "
            "Put the heads on the bare model, and the adapter on the result (`peft_config=` of the trainer)."
        )


def on_support(
    logits: torch.Tensor, top_k: int | None, score: Callable[[torch.Tensor, Callable[..., Any] | None], torch.Tensor]
) -> torch.Tensor:
    """
    Logits of a policy on its support, -inf elsewhere.

    Args:
        logits (`torch.Tensor` of shape `(..., V)`): Those of the language model.
        top_k (`int`, *optional*): The support is the `top_k` likeliest tokens of the language model, or every token.
        score (`Callable`): Called with the language model's logits of the support `(..., k)` and the `evaluate` with
            which a [`QHead`] gives the values of the same tokens; returns the policy's logits of the support.

    Returns:
        `torch.Tensor` of shape `(..., V)`.
    """
    if top_k is None or top_k >= logits.shape[-1]:
        return score(logits, None)
    support = logits.topk(top_k, dim=-1).indices
    scores = score(logits.gather(-1, support), partial(candidate_values, candidates=support))
    return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter_(-1, support, scores)


def attend_somewhere(mask: torch.Tensor) -> torch.Tensor:
    """A row without a next state attends to its padding, for attention over nothing is NaN; it is not used."""
    mask = mask.clone()
    mask[:, 0] = 1
    return mask


class SupportCheck(LogitsProcessor):
    """Stops when other processors (bad words, a minimal length) have forbidden all that `policy_top_k` left."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if not (scores > -torch.inf).any(-1).all():
            raise ValueError(
                "Every token in the support of the policy is forbidden by arguments of `generate` (`bad_words_ids`, "
                "`min_new_tokens`, ...). Raise `model.config.policy_top_k`."
            )
        return scores


__all__ = ["ILQLPreTrainedModel", "QPreTrainedModel"]
