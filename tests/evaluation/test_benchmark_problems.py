"""What benchmarks ask, and which of it stands in the training prompts."""

from __future__ import annotations

from pathlib import Path

from flat_pairs import pair_of
from made_runs import made_run
from regretless.core.files import write_json
from regretless.data.columns import Response
from regretless.data.rows import write_records
from regretless.evaluation.benchmark_problems import contamination, read_problems
from regretless.evaluation.results import EvaluateConfig
from regretless.studies.compared_runs import Run
from regretless.studies.observations import observe


def test_problems_of_both_kinds_of_benchmarks_when_read_then_prompts_are_looked_up_in_them(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"id": "s1", "prompt": "What is 3+4?", "answer": "7"}\n')
    (tmp_path / "mt.jsonl").write_text(
        '{"question_id": 5, "category": "writing", "turns": ["Write a poem.", "Shorten it."]}\n'
    )
    chat = {"benchmark": "mt_bench", "judge": "j", "questions": str(tmp_path / "mt.jsonl")}
    benchmarks = {"sums": {"dataset": str(tmp_path / "sums.jsonl"), "template": "math"}}
    config = EvaluateConfig.parse({"benchmarks": benchmarks, "chat": {"mt": chat}}, "evaluate")
    found = read_problems(config)
    assert [
        problem.benchmark for prompt in ("what is 3 + 4", "Write a poem!") for problem in found.repeated_by(prompt)
    ] == [
        "sums",
        "mt",
    ]


def test_results_when_problems_stand_in_the_training_prompts_then_a_comparison_names_the_run(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", {"base": {"sums": [1, 0]}, "dpo": {"sums": [1, 1]}})
    for label in ("base", "dpo"):
        answers = [
            Response(prompt_id=str(number), response_id=str(number), prompt=f"What is {number} + 1?", response="?")
            for number in range(2)
        ]
        write_records(folder / "evaluate" / "samples" / label / "sums" / "greedy" / "responses.parquet", answers)
    pairs = [pair_of(prompt=prompt, chosen="a", rejected="b") for prompt in ("what is 0+1", "WHAT IS 0+1", "else")]
    write_records(tmp_path / "pairs.parquet", pairs)
    config = EvaluateConfig.parse({"benchmarks": {"sums": {"dataset": "sums.jsonl"}}}, "evaluate")
    notes = contamination(folder / "evaluate", config, [tmp_path / "pairs.parquet"])
    assert [note.split(" stand")[0] for note in notes] == ["sums: 1 of 2 problems"]
    write_json(folder / "evaluate" / "results.json", {"contaminated": notes})
    assert f"{folder}: {notes[0]}" in observe([Run(folder)]).notes
