"""The bookkeeping of the benchmark of drafters with other tokenizers: resumption, differences and ratios."""

from __future__ import annotations

from pathlib import Path

from benchmarks.other_tokenizers import Key, Measurements, Run, batches, ratios

SETTINGS = {"tokens": "3", "k": "auto"}


def run(output: list[int], seconds: float = 1.0, verdicts: int = 2) -> Run:
    return Run(output, verdicts, drafted=2, draft_runs=3, seconds=seconds, processor_s=2 * seconds)


def test_measurements_of_the_same_settings_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first = Measurements(SETTINGS, file)
    first.add(Key(0, None, "outrider"), run([1, 2, 3]))
    Measurements({**SETTINGS, "k": "4"}, file).add(Key(0, None, "outrider"), run([9]))
    again = Measurements(SETTINGS, file)
    assert again.runs == first.runs == {Key(0, None, "outrider"): run([1, 2, 3])}


def test_outputs_that_differ_are_named_for_each_prompt_and_seed() -> None:
    measured = Measurements(SETTINGS, None)
    for seed in (None, 0):
        measured.add(Key(0, seed, "outrider"), run([1, 2, 3]))
    measured.add(Key(0, None, "alone"), run([1, 2, 3]))
    assert measured.different() == []
    measured.add(Key(0, 0, "alone"), run([1, 2, 4]))
    assert measured.different() == [Key(0, 0, "alone")]


def test_figures_are_those_of_prompts_that_all_compared_ways_have_answered() -> None:
    measured = Measurements(SETTINGS, None)
    measured.add(Key(0, None, "outrider"), run([1, 2, 3]))
    assert measured.figures() == {}
    measured.add(Key(0, None, "assisted"), run([1, 2, 3], seconds=1.5))
    measured.add(Key(1, None, "assisted"), run([1, 2, 3], seconds=9.0))
    figures = measured.figures()["greedy"]
    assert figures["ratio"]["assisted"]["median_seconds"] == figures["ratio"]["assisted"]["total_processor_s"] == 1.5
    assert figures["outrider"]["outputs"] == 1
    assert figures["outrider"]["acceptance_rate"] == 0.5
    assert ratios([run([1], 2.0), run([1], 4.0)], [run([1], 1.0), run([1], 1.0)])["median_seconds"] == 3.0


def test_every_measurement_is_planned_once() -> None:
    keys = [key for batch in batches(3, 2) for key in batch]
    assert len(keys) == len(set(keys)) == 3 * 3 + 2 * 3 * 2
