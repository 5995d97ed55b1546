"""Problems of settings: what tests and programs read of them."""

from __future__ import annotations

import pytest

from regretless.core.errors import ConfigError, reject


@pytest.mark.parametrize(
    ("text", "key", "code"),
    [
        ("train.lora.r: input should be greater than or equal to 1 (got 0)", "train.lora.r", "greater-than-or"),
        ("model.dtype: input should be 'auto' or 'float32' (got 'int4')", "model.dtype", "input-should-be"),
        ("pairs.dataset: no such file or folder: /nowhere/p", "pairs.dataset", "no-such-file"),
        ("trian: unknown key (got 1); did you mean train?", "trian", "unknown-key"),
        ("pairs_per_step: 8 pairs cannot be divided", "pairs_per_step", "pairs-cannot-be"),
        ("nothing to do", "", "nothing-to-do"),
        ("threads: 3", "threads", ""),
    ],
)
def test_problem_when_of_a_setting_then_it_has_its_key_and_a_code_without_values(
    text: str, key: str, code: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        reject("recipe", [text])
    (problem,) = caught.value.problems
    assert (problem.key, problem.code, str(problem)) == (key, code, text)
    assert str(caught.value) == f"recipe: 1 problem(s)\n  - {text}"
