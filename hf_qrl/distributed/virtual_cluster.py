# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Interpreters for actors, under NeMo-RL's names."""

import sys


class PY_EXECUTABLES:
    """
    Interpreters an actor can be asked to run in. NeMo-RL has one virtual environment per kind of actor; here there is
    one, the running interpreter's.
    """

    SYSTEM = sys.executable
    BASE = sys.executable
