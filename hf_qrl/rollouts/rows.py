# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A played episode as a row of the dataset."""

import traceback
from typing import Any

from ..data.episodes import make_episode
from ..environments.failures import FailureClass
from .player import Episode, EpisodeFailure, start_tools


# What a metadata dict of a text environment says in columns of its own, or to nobody but the environment.
_KNOWN_METADATA = ("_session", "_seed", "_legal_actions", "_tools", "_close_failure")


def episode_row(episode: Episode, constants: dict[str, Any], keep_tokens: bool) -> dict[str, Any] | EpisodeFailure:
    """The row of an episode; a failure if there was something in it that no row can hold."""
    if keep_tokens and any(action.token_ids is None for action in episode.actions):
        raise ValueError("`keep_tokens` needs a policy that samples tokens, such as `ModelPolicy`.")
    try:
        return _checked_row(episode, constants, keep_tokens)
    except Exception as error:
        plan = episode.plan
        return EpisodeFailure(
            plan.episode_id,
            plan.index,
            plan.seed,
            turn=len(episode.rewards),
            kind="error",
            failure_class=str(FailureClass.DATA),
            message=f"No row can be made of it. {error}",
            traceback_text="".join(traceback.format_exception(error)),
        )


def _checked_row(episode: Episode, constants: dict[str, Any], keep_tokens: bool) -> dict[str, Any]:
    actions = episode.actions
    start = episode.start.metadata
    if episode.start.stateful:
        start = {key: value for key, value in start.items() if key not in _KNOWN_METADATA}
    columns: dict[str, Any] = dict(constants)
    if keep_tokens:
        columns["turn_token_ids"] = [action.token_ids for action in actions]
        columns["turn_logprobs"] = [action.logprobs for action in actions]
        if all(action.prompt_ids is not None for action in actions):
            columns["turn_prompt_ids"] = [action.prompt_ids for action in actions]
    success = episode.infos[-1].get("success")
    if not isinstance(success, bool | None):
        raise ValueError(f"`success` must be True or False, got {success!r}.")
    info: dict[str, Any] = {}
    if any(episode.infos):
        info["turns"] = episode.infos
    if any(action.num_tokens for action in actions):
        info["num_tokens"] = [action.num_tokens for action in actions]
        info["num_prompt_tokens"] = [action.num_prompt_tokens for action in actions]
    return make_episode(
        episode.messages,
        episode.rewards,
        terminated=episode.terminated,
        episode_id=episode.plan.episode_id,
        seed=episode.plan.seed,
        tools=start_tools(episode.start),
        turn_reward_components=episode.reward_components if any(episode.reward_components) else None,
        turn_finish=[action.finish for action in actions],
        truncation_reason=None if episode.terminated else episode.truncation_reason,
        success=success,
        turn_legal_actions=episode.legal_actions if any(episode.legal_actions) else None,
        metadata=start,
        info=info or None,
        **columns,
    )
