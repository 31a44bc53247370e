# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from tests.hub.fixtures import api, assert_same_bits, hub, hub_environment  # noqa: F401
