# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Environments written against the documented interface of NeMo-RL: with its package in the imports they would run there.

Written for these tests; none of them is NeMo-RL's.
"""

import json
import random
import re
import subprocess
import sys

import torch

from hf_qrl.data.interfaces import LLMMessageLogType
from hf_qrl.distributed.batched_data_dict import BatchedDataDict
from hf_qrl.distributed.virtual_cluster import PY_EXECUTABLES
from hf_qrl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from hf_qrl.environments.metrics import calculate_pass_rate_per_prompt
from hf_qrl.environments.utils import chunk_list_to_workers


class SlidingPuzzle(EnvironmentInterface[dict]):
    """Tiles 1..n*n-1 and a gap, 0; the state is all in the metadata. The last `<action>tile</action>` moves a tile."""

    STOP = "</action>"

    def __init__(self, cfg: dict | None = None):
        self.max_moves = (cfg or {}).get("max_moves", 20)

    @staticmethod
    def start(seed: int, size: int = 3, moves: int = 5) -> dict:
        generator = random.Random(seed)
        board = [*range(1, size * size), 0]
        for _ in range(moves):
            tile = generator.choice(SlidingPuzzle.movable(board, size))
            SlidingPuzzle.move(board, tile)
        return {"board": board, "size": size, "moves": 0}

    @staticmethod
    def movable(board: list[int], size: int) -> list[int]:
        gap = board.index(0)
        return [
            tile
            for i, tile in enumerate(board)
            if tile and abs(i // size - gap // size) + abs(i % size - gap % size) == 1
        ]

    @staticmethod
    def move(board: list[int], tile: int) -> None:
        gap, i = board.index(0), board.index(tile)
        board[gap], board[i] = tile, 0

    def _turn(self, log: LLMMessageLogType, state: dict) -> tuple[str, dict | None, float, bool]:
        found = re.findall(r"<action>\s*(\d+)\s*</action>", str(log[-1]["content"]))
        if not found:
            return "Say <action>tile</action>.", None, 0.0, False
        board = list(state["board"])
        tile = int(found[-1])
        if tile in self.movable(board, state["size"]):
            self.move(board, tile)
        new_state = {**state, "board": board, "moves": state["moves"] + 1}
        if board == [*range(1, len(board)), 0]:
            return "Solved.", new_state, 1.0, True
        if new_state["moves"] >= self.max_moves:
            new_state["_truncated"] = True
        return f"Board: {board}", new_state, 0.0, False

    def step(self, message_log_batch, metadata_batch):
        turns = [self._turn(log, state) for log, state in zip(message_log_batch, metadata_batch, strict=True)]
        texts, states, rewards, ends = (list(column) for column in zip(*turns, strict=True))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text in texts],
            metadata=states,
            next_stop_strings=[None if end else [self.STOP] for end in ends],
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ends),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict):
        return batch, {"success": (batch["total_reward"] > 0).float().mean().item()}


class CodeExecution(EnvironmentInterface[dict]):
    """Runs `<code>...</code>` in a fresh interpreter, which is killed at the deadline; a result ends the episode."""

    DEFAULT_PY_EXECUTABLE = PY_EXECUTABLES.SYSTEM

    def __init__(self, cfg: dict | None = None):
        self.timeout = (cfg or {}).get("timeout", 10.0)

    def _execute(self, log: LLMMessageLogType) -> str:
        source = re.search(r"<code>(.*?)</code>", str(log[-1]["content"]), re.DOTALL)
        if source is None:
            return "No code."
        try:
            # -I and -S: neither the working directory, the user's packages nor the environment's variables matter.
            run = subprocess.run(
                [self.DEFAULT_PY_EXECUTABLE, "-I", "-S", "-c", source.group(1)],
                capture_output=True,
                text=True,
                timeout=self.timeout,
            )
        except subprocess.TimeoutExpired:
            return "Timeout."
        return run.stdout if run.returncode == 0 else run.stderr.strip().splitlines()[-1]

    def step(self, message_log_batch, metadata):
        chunks = chunk_list_to_workers(message_log_batch, 2)
        outputs = [self._execute(log) for chunk in chunks for log in chunk]
        ends = [output == state["expected"] for output, state in zip(outputs, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"<result>{output}</result>"} for output in outputs],
            metadata=[None if end else state for end, state in zip(ends, metadata, strict=True)],
            next_stop_strings=[["</code>"]] * len(outputs),
            rewards=torch.tensor([float(end) for end in ends]),
            terminateds=torch.tensor(ends, dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict):
        return batch, {}


class Maths(EnvironmentInterface[dict]):
    """Compares the last number of a reply with the answer. One turn; `terminateds` is a float tensor, as is common."""

    def __init__(self, cfg: dict | None = None):
        self.cfg = cfg or {}

    def step(self, message_log_batch, metadata, return_extracted_answer: bool = False):
        found = [re.findall(r"-?\d+(?:\.\d+)?", str(log[-1]["content"])) for log in message_log_batch]
        answers = [numbers[-1] if numbers else None for numbers in found]
        right = [
            answer is not None and float(answer) == float(state["ground_truth"])
            for answer, state in zip(answers, metadata, strict=True)
        ]
        rewards = torch.tensor([1.0 if correct else 0.0 for correct in right])
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: {json.dumps(correct)}"} for correct in right
            ],
            metadata=metadata,
            next_stop_strings=[None] * len(right),
            rewards=rewards,
            terminateds=torch.ones_like(rewards),
            answers=answers if return_extracted_answer else None,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict):
        rate = calculate_pass_rate_per_prompt(batch["text_ids"], batch["rewards"])
        return batch, {"pass_rate": rate, "interpreter": sys.executable}
