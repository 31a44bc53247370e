# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Trainers and their arguments."""
