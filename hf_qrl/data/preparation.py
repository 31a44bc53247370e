# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A dataset of rewarded texts or conversations becomes a dataset of tokenised rows."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from .chat import ChatRenderer, Message, check_messages, training_chat_template, window_messages, without_none
from .formats import column_names, detect_format, is_conversational
from .rewards import scalar_reward, standardize, turn_rewards
from .rows import build_row, check_row, check_token_ids, check_weight, row_features
from .seq2seq import Seq2SeqRenderer
from .tokenization import DialogMessage, dialogue_phrases, output_spans, tokenize_dialogue


@dataclass(frozen=True)
class _Options:
    """What the mapped functions need besides a row and the tokenizer; hashed into the key of the cache."""

    format: str  # "messages", "prompt-completion" (conversational), "text" or "samples"
    reward_column: str
    chat_template: str  # "" where nothing is rendered
    max_length: int | None
    truncation_side: str
    history_window: int | None
    reward_mean: float | None
    reward_std: float | None
    vocab_size: int | None
    eos_token_ids: tuple[int, ...]
    decoder_start_token_id: int | None = None  # of an encoder-decoder model
    version: str = version("hf_qrl")  # another one may make other rows of the same data

    @property
    def cut(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "truncation_side": self.truncation_side}


def prepare_dataset(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
    truncation_side: str = "right",
    history_window: int | None = None,
    reward_mean: float | None = None,
    reward_std: float | None = None,
    vocab_size: int | None = None,
    chat_template: str | None = None,
    eos_token_id: int | list[int] | None = None,
    decoder_start_token_id: int | None = None,
    num_proc: int | None = None,
    description: str = "Tokenizing",
) -> Dataset | IterableDataset:
    """
    Tokenises a dataset of rewarded texts or conversations into the columns that [`DataCollatorForILQL`] reads, or with
    a `decoder_start_token_id` into those that [`DataCollatorForSeq2SeqILQL`] reads.

    Accepted columns (others are dropped):

    - `prompt`, `completion` and `reward` (a number for the episode) or `label` (a bool, 1 or -1): strings, or lists of
      messages. The tokens of the completion are actions; assistant messages of the prompt are context.
    - `messages` with `rewards` or `turn_rewards` (one number per assistant message) or `reward`. Conversational
      `prompt` and `completion` take them too, one number per assistant message of the completion.
    - `samples` and `rewards`: trlX dialogues with one number each.
    - `input_ids`, `actions_ixs`, `states_ixs`, `dones`, `rewards`: already tokenised. Such a dataset is checked and
      returned as it is, so preparing twice changes nothing.
    - optional: `terminated` or `truncated` (bool; `terminated` wins; by default the episode terminated), `weight`
      (positive), and for conversations `tools` and `chat_template_kwargs`.

    A terminated row ends with its last action. A truncated one keeps its final observation, rendered with the
    generation prompt, and gets no end-of-turn token if the assistant was cut while speaking.

    **Encoder-decoder models** get one row per assistant message (or output of `samples`): the encoder reads the whole
    conversation so far as one text, the decoder says the message, and the value after it is that of the next turn, as
    with a `history_window`. The encoder's tokens are those of inference: `tokenizer(prompt)` for strings;
    `tokenizer("".join(phrases))` for the phrases of `samples` so far (`tokenizer("")` for an output without prompt);
    for conversations `tokenizer.apply_chat_template(messages, add_generation_prompt=True)` if the tokenizer has a
    template, else `tokenizer(conversation_text(messages))`. The decoder's are the decoder start token and
    `tokenizer(text_target=reply)`, with an end-of-text token unless the assistant was cut while speaking.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset to tokenise. A `Dataset` is mapped on disk, cached.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the model. Not needed if the dataset is already tokenised.
        max_length (`int`, *optional*):
            Largest number of tokens of a row; of an encoder-decoder model those of the encoder and of the decoder,
            each.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            Where longer rows are cut. `"right"` makes the row truncated; `"left"` keeps its end and how it ended. An
            encoder always keeps its end, as a tokenizer with `truncation_side="left"` does, and a decoder its
            beginning: it takes `"right"` only.
        history_window (`int`, *optional*):
            Makes one row per assistant message, whose context is what [`window_messages`] selects; the context of the
            next turn travels as `next_input_ids`, empty where the episode ends. A row is `truncated` if its own last
            token is the state to bootstrap from, that is if there is no next context to do so.
        reward_mean (`float`, *optional*):
            Subtracted from the return of every terminated episode (after division by `reward_std`, where given).
        reward_std (`float`, *optional*):
            Divides every reward.
        vocab_size (`int`, *optional*):
            Size of the model's vocabulary, to check token ids against.
        chat_template (`str`, *optional*):
            Template for conversations. Defaults to [`training_chat_template`].
        eos_token_id (`int` or `list[int]`, *optional*):
            Tokens that end generation, as in the model's `generation_config`; defaults to the tokenizer's. The actions
            of an assistant message end with the first of them, so that no action is learned that is never taken.
        decoder_start_token_id (`int`, *optional*):
            Makes rows for an encoder-decoder model, whose decoder starts with this token.
        num_proc (`int`, *optional*):
            Number of processes. Ignored for a streaming dataset.
        description (`str`, *optional*, defaults to `"Tokenizing"`):
            Text of the progress bar.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`]: rows of `input_ids`, `attention_mask`, `rewards`,
        `states_ixs`, `actions_ixs`, `dones`, `turn_ixs`, `truncated`, with `weight` where the dataset has one, with
        `next_input_ids` and `next_attention_mask` where an episode may have several rows (`history_window`;
        conversations and `samples` of an encoder-decoder model), and with `decoder_input_ids` for such a model.

    Raises:
        ValueError: If the columns, an argument or a row is not as described. The message names the row.

    Examples:

    ```python
    >>> from datasets import Dataset
    >>> from transformers import AutoTokenizer

    >>> dataset = Dataset.from_dict({"prompt": ["2 + 2 ="], "completion": [" 4"], "reward": [1.0]})
    >>> prepare_dataset(dataset, AutoTokenizer.from_pretrained("gpt2"))[0]["rewards"]
    [0.0, 1.0]
    ```
    """
    columns = column_names(dataset)
    name, reward_column = detect_format(columns)
    if truncation_side not in ("left", "right"):
        raise ValueError(f'`truncation_side` must be "left" or "right", got {truncation_side!r}.')
    if truncation_side == "left" and decoder_start_token_id is not None:
        raise ValueError(
            'truncation_side="left" would cut the start off the decoder of an encoder-decoder model. Use "right": the '
            "encoder keeps its end in any case."
        )
    if reward_std is not None and not reward_std > 0:
        raise ValueError(f"`reward_std` must be positive, got {reward_std}.")
    if name == "tokenized":
        if decoder_start_token_id is None and "decoder_input_ids" in columns:
            raise ValueError(
                "The tokenised rows have `decoder_input_ids`, which a causal language model does not read: train an "
                "encoder-decoder model on them (`decoder_start_token_id`), or drop the column."
            )
        if decoder_start_token_id is not None and "decoder_input_ids" not in columns:
            raise ValueError(
                "The tokenised rows have no `decoder_input_ids`, which an encoder-decoder model needs: they were made "
                "for a causal one. Prepare them from text, or add the column with `actions_ixs` that point into it."
            )
        if history_window is not None and "next_input_ids" not in columns:
            raise ValueError(
                "`history_window` is set, and the tokenised rows have no `next_input_ids`, the states after their "
                "windows. Prepare them from `messages`, or leave `history_window` out."
            )
        return _checked(
            dataset.with_format(None),
            {
                "vocab_size": vocab_size,
                "max_length": max_length,
                "decoder_start_token_id": decoder_start_token_id,
            },
        )
    if tokenizer is None:
        raise ValueError(f"A dataset with the columns {sorted(columns)} needs a tokenizer, got None.")
    if history_window is not None and history_window < 1:
        raise ValueError(f"`history_window` must be at least 1, got {history_window}.")

    dataset = dataset.with_format(None)
    conversational = is_conversational(dataset)
    if history_window is not None and not conversational:
        raise ValueError(
            "`history_window` counts assistant messages: it needs a conversational dataset, got text in the columns "
            f"{sorted(columns)}. Use `messages`, or leave `history_window` out."
        )
    if conversational and chat_template is None and (tokenizer.chat_template or decoder_start_token_id is None):
        chat_template = training_chat_template(tokenizer)
    options = _Options(
        format="text" if name == "prompt-completion" and not conversational else name,
        reward_column=reward_column,
        chat_template=chat_template or "",
        max_length=max_length,
        truncation_side=truncation_side,
        history_window=history_window,
        reward_mean=reward_mean,
        reward_std=reward_std,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(eos_token_id, tokenizer),
        decoder_start_token_id=decoder_start_token_id,
    )
    several_rows = history_window is not None or (decoder_start_token_id is not None and options.format != "text")
    features = row_features(
        weight="weight" in columns, next_state=several_rows, decoder=decoder_start_token_id is not None
    )
    map_kwargs = {} if isinstance(dataset, IterableDataset) else {"num_proc": num_proc, "desc": description}
    return dataset.map(
        _prepare_batch,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        features=features,
        fn_kwargs={"tokenizer": tokenizer, "options": options, "columns": list(features)},
        **map_kwargs,
    )


def _eos_token_ids(eos_token_id: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if eos_token_id is None:
        eos_token_id = [] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


def _prepare_batch(
    batch: dict[str, list],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    options: _Options,
    columns: list[str],
) -> dict[str, list]:
    rows = []
    for values, index in zip(zip(*batch.values(), strict=True), indices, strict=True):
        rows += _prepare_episode(dict(zip(batch, values, strict=True)), f"Row {index}", tokenizer, options)
    return {column: [row[column] for row in rows] for column in columns}


def _prepare_episode(
    episode: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, options: _Options
) -> list[dict[str, Any]]:
    """Returns the rows of one episode: a single one, or one per turn (history windows, encoder-decoder models)."""
    terminated = _terminated(episode, where)
    if options.format == "samples":
        rows = _dialogue_rows(episode, terminated, where, tokenizer, options)
    elif options.format == "text":
        rows = _text_rows(episode, terminated, where, tokenizer, options)
    else:
        rows = _conversation_rows(episode, terminated, where, tokenizer, options)
    for row in rows:
        for column in ("input_ids", "decoder_input_ids", "next_input_ids"):
            if column in row:
                check_token_ids(row[column], options.vocab_size, where)
        if "weight" in episode:
            row["weight"] = check_weight(episode["weight"], where)
    return rows


def _terminated(episode: dict[str, Any], where: str) -> bool:
    for column in ("terminated", "truncated"):
        if column in episode:
            if not isinstance(episode[column], bool):
                raise ValueError(f"{where}: `{column}` must be True or False, got {episode[column]!r}.")
            return episode[column] if column == "terminated" else not episode[column]
    return True


def _seq2seq_renderer(
    where: str, tokenizer: PreTrainedTokenizerBase, options: _Options, chat: ChatRenderer | None = None
) -> Seq2SeqRenderer | None:
    """What makes the rows of an encoder-decoder model; None for a causal one."""
    if options.decoder_start_token_id is None:
        return None
    return Seq2SeqRenderer(
        tokenizer,
        options.decoder_start_token_id,
        where,
        max_length=options.max_length,
        eos_token_ids=options.eos_token_ids,
        chat=chat,
    )


def _dialogue_rows(
    episode: dict[str, Any], terminated: bool, where: str, tokenizer: PreTrainedTokenizerBase, options: _Options
) -> list[dict[str, Any]]:
    seq2seq = _seq2seq_renderer(where, tokenizer, options)
    messages: list[DialogMessage] = []
    try:
        phrases = dialogue_phrases(episode["samples"], prompt="")
        if seq2seq is None:
            messages = tokenize_dialogue(episode["samples"], tokenizer, append_eos=terminated)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: `samples` must be a string or a list of strings: {error}") from error
    spans = output_spans(messages)
    num_turns = len(spans) if seq2seq is None else len(phrases) // 2
    if num_turns == 0:
        raise ValueError(f"{where}: `samples` has no output text, so no action tokens. Add some, or drop the row.")
    rewards = [0.0] * (num_turns - 1) + [scalar_reward(episode["rewards"], "rewards", where)]
    rewards = standardize(rewards, options.reward_mean, options.reward_std, terminated)
    if seq2seq is not None:
        contexts = ["".join(phrases[: i + 1]) for i in range(0, len(phrases), 2)]
        return _turn_rows(contexts, phrases[1::2], rewards, None, terminated, seq2seq.source, seq2seq.row)
    input_ids = [token for message in messages for token in message.tokens]
    return [build_row(input_ids, spans, rewards, terminated=terminated, where=where, **options.cut)]


def _text_rows(
    episode: dict[str, Any], terminated: bool, where: str, tokenizer: PreTrainedTokenizerBase, options: _Options
) -> list[dict[str, Any]]:
    prompt, completion = episode["prompt"], episode["completion"]
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError(
            f"{where}: `prompt` and `completion` must both be strings (or in every row lists of messages), got "
            f"{type(prompt).__name__} and {type(completion).__name__}."
        )
    rewards = turn_rewards(episode[options.reward_column], options.reward_column, 1, where)
    rewards = standardize(rewards, options.reward_mean, options.reward_std, terminated)
    seq2seq = _seq2seq_renderer(where, tokenizer, options)
    if seq2seq is not None:
        return [seq2seq.row(prompt, completion, rewards[0], terminated)]
    # Tokenised as one text, because that is what the model meets; the completion is what follows the prompt's tokens.
    prompt_ids = tokenizer(prompt)["input_ids"]
    input_ids = tokenizer(prompt + completion)["input_ids"]
    if input_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            f"{where}: the tokens of `prompt` are not a prefix of those of `prompt` + `completion`, so training would "
            "see other contexts than generation. Move spaces at the end of the prompt to the start of the completion."
        )
    eos = tokenizer.eos_token_id
    ends = {eos, *options.eos_token_ids}
    if terminated and eos is not None and not ends & set(input_ids[len(prompt_ids) :][-1:]):
        input_ids = [*input_ids, eos]
    turns = [(len(prompt_ids), len(input_ids))]
    return [build_row(input_ids, turns, rewards, terminated=terminated, where=where, **options.cut)]


def _conversation_rows(
    episode: dict[str, Any], terminated: bool, where: str, tokenizer: PreTrainedTokenizerBase, options: _Options
) -> list[dict[str, Any]]:
    if options.format == "messages":
        messages, num_context = check_messages(episode["messages"], "messages", where), 0
    else:
        prompt = check_messages(episode["prompt"], "prompt", where)
        messages = prompt + check_messages(episode["completion"], "completion", where)
        num_context = len(prompt)
    turns = [i for i in range(num_context, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise ValueError(f"{where}: no assistant message, so no action tokens. Add one, or drop the row.")
    rewards = turn_rewards(episode[options.reward_column], options.reward_column, len(turns), where)
    rewards = standardize(rewards, options.reward_mean, options.reward_std, terminated)
    if terminated:
        messages = messages[: turns[-1] + 1]

    tools = episode.get("tools")
    tools = without_none(json.loads(tools) if isinstance(tools, str) else tools)
    template_kwargs = without_none(episode.get("chat_template_kwargs") or {})
    if not options.chat_template and (tools or template_kwargs):
        raise ValueError(
            f"{where}: `tools` and `chat_template_kwargs` are for a chat template, and the tokenizer has none. Set "
            "`tokenizer.chat_template`, or drop the columns."
        )
    renderer = ChatRenderer(
        tokenizer,
        options.chat_template,
        where,
        tools=tools,
        template_kwargs=template_kwargs,
        eos_token_ids=options.eos_token_ids,
    )
    seq2seq = _seq2seq_renderer(where, tokenizer, options, renderer if options.chat_template else None)
    if seq2seq is not None or options.history_window is not None:
        makers = _causal_turns(renderer, options) if seq2seq is None else (seq2seq.source, seq2seq.row)
        return _window_rows(messages, turns, rewards, terminated, options.history_window, where, *makers)
    cut_while_speaking = not terminated and turns[-1] == len(messages) - 1
    input_ids, spans = renderer.render(messages, turns, cut_while_speaking)
    return [build_row(input_ids, spans, rewards, terminated=terminated, where=where, **options.cut)]


# What makes the tokens of a context, and the row of a turn: (context, reply, reward, whether the reply is finished).
Source = Callable[[Any], list[int]]
Row = Callable[[Any, Any, float, bool], dict[str, Any]]


def _causal_turns(renderer: ChatRenderer, options: _Options) -> tuple[Source, Row]:
    """How a causal model reads the context of a turn, and its row."""

    def source(context: list[Message]) -> list[int]:
        input_ids = renderer.prompt(context)
        return input_ids if options.max_length is None else input_ids[-options.max_length :]

    def row(context: list[Message], reply: Message, reward: float, finished: bool) -> dict[str, Any]:
        input_ids, spans = renderer.render([*context, reply], [len(context)], not finished)
        return build_row(input_ids, spans, [reward], terminated=finished, where=renderer.where, **options.cut)

    return source, row


def _window_rows(
    messages: list[Message],
    turns: list[int],
    rewards: list[float],
    terminated: bool,
    history_window: int | None,
    where: str,
    source: Source,
    row: Row,
) -> list[dict[str, Any]]:
    """Makes one row per turn of a conversation, whose context is what [`window_messages`] selects."""
    try:
        contexts = [window_messages(messages[:turn], history_window) for turn in turns]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    final = None
    if messages[-1]["role"] != "assistant":  # the final observation of a truncated episode
        final = window_messages(messages, history_window)
    return _turn_rows(contexts, [messages[turn] for turn in turns], rewards, final, terminated, source, row)


def _turn_rows(
    contexts: list,
    replies: list,
    rewards: list[float],
    final_context: Any,
    terminated: bool,
    source: Source,
    row: Row,
) -> list[dict[str, Any]]:
    """Makes one row per turn. The value after a turn is read in the next turn's own context, where it is trained."""
    next_contexts = contexts[1:] if final_context is None else [*contexts[1:], final_context]
    rows = []
    for i, (context, reply, reward) in enumerate(zip(contexts, replies, rewards, strict=True)):
        has_next = i < len(next_contexts)
        this = row(context, reply, reward, terminated or has_next)
        # A row cut at max_length bootstraps from its own last state.
        next_ids = source(next_contexts[i]) if has_next and not this["truncated"] else []
        rows.append({**this, "next_input_ids": next_ids, "next_attention_mask": [1] * len(next_ids)})
    return rows


def _checked(dataset: Dataset | IterableDataset, checks: dict[str, Any]) -> Dataset | IterableDataset:
    """Checks tokenised rows: now and without a copy if they can be read again, as they pass if they are a stream."""
    if isinstance(dataset, IterableDataset):
        return dataset.map(
            _check_batch, batched=True, with_indices=True, features=dataset.features, fn_kwargs={"checks": checks}
        )
    start = 0
    for batch in dataset.iter(batch_size=1000):
        stop = start + len(batch["input_ids"])
        _check_batch(batch, list(range(start, stop)), checks)
        start = stop
    return dataset


def _check_batch(batch: dict[str, list], indices: list[int], checks: dict[str, Any]) -> dict[str, list]:
    for values, index in zip(zip(*batch.values(), strict=True), indices, strict=True):
        check_row(dict(zip(batch, values, strict=True)), where=f"Row {index}", **checks)
    return batch
