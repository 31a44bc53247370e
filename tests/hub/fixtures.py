# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A local Hub, a client that speaks to it alone, and tiny models to push."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import transformers.utils.hub
from huggingface_hub import HfApi, constants, hf_api
from huggingface_hub.utils import _http, close_session

from tests.hub.hub_server import TOKEN, HubServer


@pytest.fixture
def hub_environment(tmp_path):
    """The variables that make another process a client of nothing but a cache of its own; see `hub`."""
    home = tmp_path / "hf_home"
    return {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_MODULES_CACHE": str(home / "modules"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": TOKEN,
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture
def hub(monkeypatch, hub_environment):
    """
    A running [`HubServer`] that this process takes for the Hub, with an empty cache and its owner's token.

    Everything looks the endpoint and the cache up in `huggingface_hub.constants` when it needs them, except the two
    `HfApi` objects that are made once.
    """
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub_environment["HF_ENDPOINT"] = server.endpoint
    for name, value in hub_environment.items():
        monkeypatch.setenv(name, value)
    home = hub_environment["HF_HOME"]
    changes = {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": home,
        "HF_HUB_CACHE": hub_environment["HF_HUB_CACHE"],
        "HF_TOKEN_PATH": f"{home}/token",
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in changes.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", server.endpoint)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    # The client waits seconds between attempts.
    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
    close_session()
    yield server
    close_session()
    server.shutdown()
    server.server_close()
    thread.join()
    assert not server.unknown, f"the server does not know {server.unknown}"


@pytest.fixture
def api(hub) -> HfApi:
    return HfApi(endpoint=hub.endpoint)


@pytest.fixture
def assert_same_bits():
    """Returns a function that compares all parameters and buffers of two models."""

    def check(got: torch.nn.Module, expected: torch.nn.Module) -> None:
        left = dict([*got.named_parameters(), *got.named_buffers()])
        right = dict([*expected.named_parameters(), *expected.named_buffers()])
        assert left.keys() == right.keys()
        different = [name for name in right if not torch.equal(left[name], right[name])]
        assert not different, f"{len(different)} of {len(right)} tensors differ: {different[:5]}"

    return check
