# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Other libraries' environments as [`~hf_qrl.environments.TextEnv`]. Each imports its library when it is used."""

from .gymnasium import from_gymnasium
from .lmrl import from_lmrl
from .openenv import from_openenv
from .private_random import with_private_random
from .reward_function import from_reward_function
from .skyrl import from_skyrl
from .textarena import from_textarena
from .trl import from_trl_environment, to_trl_environment


__all__ = [
    "from_gymnasium",
    "from_lmrl",
    "from_openenv",
    "from_reward_function",
    "from_skyrl",
    "from_textarena",
    "from_trl_environment",
    "to_trl_environment",
    "with_private_random",
]
