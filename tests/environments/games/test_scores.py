# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest

from hf_qrl.environments.games.scores import METHODS, PUBLISHED_SCORES, SCALES, ScoreScale, normalized_score


MAZE = SCALES["maze"]


class TestNormalizedScore:
    @pytest.mark.parametrize("raw, score", [(-101, 0), (-83, 50), (-6.84, 100), (-92, 25), (-44.92, 75)])
    def test_is_linear_on_either_side_of_the_mean(self, raw, score):
        assert normalized_score(raw, MAZE) == pytest.approx(score)

    def test_is_not_clipped(self):
        assert normalized_score(-401, MAZE) == pytest.approx(50 * -300 / 18)
        assert normalized_score(-7.25, SCALES["partially observed maze"]) > 100

    @pytest.mark.parametrize("scale", [(0, 0, 1), (0, 1, 1), (1, 0, 2), (0, float("nan"), 1)])
    def test_needs_three_different_returns(self, scale):
        with pytest.raises(ValueError, match="minimum < mean < maximum"):
            normalized_score(0.5, ScoreScale(*scale))


class TestPublished:
    def test_tasks_and_methods(self):
        assert set(PUBLISHED_SCORES) - set(SCALES) == {"car dealer"} and set(SCALES) < set(PUBLISHED_SCORES)
        assert all(tuple(row) == METHODS for row in PUBLISHED_SCORES.values())

    def test_scales(self):
        assert MAZE == (-101, -83, -6.84)
        assert SCALES["partially observed maze"].maximum == -25.75
        assert SCALES["wordle"] == (-6, -4.12, -1.94)
        assert SCALES["text navigation"] == (0, 0.26, 1)

    @pytest.mark.parametrize(
        "task, method", [("maze", "ILQL"), ("maze", "PPO"), ("wordle", "ILQL"), ("chess endgames", "PPO")]
    )
    def test_the_formula_gives_published_cells(self, task, method):
        published = PUBLISHED_SCORES[task][method]
        assert normalized_score(published.raw, SCALES[task]) == pytest.approx(published.normalized, abs=1)

    def test_a_third_of_the_published_cells_do_not_follow_from_the_formula(self):
        """A check of the transcription: it was counted from the paper, 21 of 63 cells, by hand."""
        wrong = [
            abs(normalized_score(score.raw, SCALES[task]) - score.normalized) > 1
            for task, row in PUBLISHED_SCORES.items()
            if task in SCALES
            for score in row.values()
        ]
        assert (sum(wrong), len(wrong)) == (21, 63)
