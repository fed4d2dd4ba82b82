"""The generated problems of the tiny model: arithmetic, stages, split, variety, tokenizer."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from traces.tiny.data import ERROR_SHARE, LARGEST, Chain, Problem, apply, problems, sample_chain
from traces.tiny.drill import result_spans, sample_drill
from traces.tiny.scoring import (
    exact_share,
    final_number,
    in_form,
    is_hedged,
    sums,
    unhedged_sums_right,
)
from traces.tiny.stages import SOLUTION_STAGES, stage_of_positions
from traces.tiny.tokenizer import CharTokenizer

COUNT = 3000


@pytest.fixture(scope="module")
def sampled() -> list[Problem]:
    """Problems of the training split."""
    return list(itertools.islice(problems(seed=1), COUNT))


def spans(problem: Problem, label: str) -> list[str]:
    """The texts of one stage of a solution."""
    return [problem.solution[a:b] for name, a, b in problem.stages if name == label]


def test_answer_follows_from_the_chain(sampled: list[Problem]) -> None:
    for problem in sampled:
        value = problem.chain.start
        for sign, operand in problem.chain.operations:
            value = apply(value, sign, operand)
            assert 1 <= value <= LARGEST
        assert final_number(problem.solution) == value == problem.answer


def test_every_sum_outside_hedged_steps_is_right(sampled: list[Problem]) -> None:
    for problem in sampled:
        assert unhedged_sums_right(problem.solution), problem.solution
        assert in_form(problem.solution), problem.solution


def test_steps_run_the_chain_and_the_check_undoes_it(sampled: list[Problem]) -> None:
    for problem in sampled:
        values, operations = problem.chain.values(), problem.chain.operations
        expected = [
            f"{left} {sign} {operand} = {right}"
            for left, (sign, operand), right in zip(values, operations, values[1:], strict=False)
        ]
        work = [line for line in problem.solution.split("\n") if not is_hedged(line)]
        work = [line for line in work if line.startswith(("Step", "Wait"))]
        assert [text for line in work for text, _ in sums(line)] == expected
        (check,) = spans(problem, "check")
        results = [int(text.split()[-1]) for text, _ in sums(check)]
        assert results == values[-2::-1]


def test_wrong_steps_are_wrong_and_then_repaired(sampled: list[Problem]) -> None:
    waits = [text for problem in sampled for text in spans(problem, "wait")]
    for text in waits:
        hedged, repair = text.rstrip("\n").split("\n")
        ((wrong, right),) = sums(hedged)
        assert is_hedged(hedged)
        assert not right
        assert repair.startswith("Wait, ")
        ((repaired, right),) = sums(repair)
        assert right
        assert repaired.split(" = ")[0] == wrong.split(" = ")[0]
    assert len(waits) / COUNT == pytest.approx(ERROR_SHARE, abs=0.04)


def test_question_holds_the_numbers_of_the_chain_in_order(sampled: list[Problem]) -> None:
    for problem in sampled:
        numbers = [problem.chain.start, *(operand for _, operand in problem.chain.operations)]
        assert [int(text) for text in re.findall(r"\d+", problem.question)] == numbers


def test_stages_partition_the_solution(sampled: list[Problem]) -> None:
    for problem in sampled:
        end = 0
        for label, start, stop in problem.stages:
            assert label in SOLUTION_STAGES
            assert start == end < stop
            end = stop
        assert end == len(problem.solution)


def test_stage_of_positions_agrees_with_the_generator(sampled: list[Problem]) -> None:
    for problem in sampled:
        expected = ["question"] * len(problem.prompt)
        for label, start, stop in problem.stages:
            expected += [label] * (stop - start)
        assert stage_of_positions(problem.text) == expected


def test_stage_labels_do_not_depend_on_later_lines(sampled: list[Problem]) -> None:
    for problem in sampled[:50]:
        whole = stage_of_positions(problem.text)
        for match in re.finditer("\n", problem.text):
            assert stage_of_positions(problem.text[: match.end()]) == whole[: match.end()]


def test_held_out_chains_and_questions_are_never_trained_on(sampled: list[Problem]) -> None:
    held = list(itertools.islice(problems(seed=2, held_out=True), COUNT // 3))
    assert all(problem.chain.held_out() for problem in held)
    assert not {problem.chain for problem in held} & {problem.chain for problem in sampled}
    assert not {problem.question for problem in held} & {problem.question for problem in sampled}


def test_split_is_fixed_and_takes_about_a_tenth() -> None:
    rng = np.random.default_rng(0)
    for wanted in (False, True):
        assert all(sample_chain(rng, wanted).held_out() == wanted for _ in range(50))
    fixed = [Chain("running", start, (("+", 5), ("-", 3))) for start in range(4, 91)]
    # The hash must not drift: the committed checkpoint was trained on one side of it.
    expected = [17, 26, 43, 45, 50, 62, 74, 77, 79, 80, 86, 88]
    assert [chain.start for chain in fixed if chain.held_out()] == expected


def test_no_text_repeats_in_twenty_thousand() -> None:
    texts = {problem.text for problem in itertools.islice(problems(seed=3), 20_000)}
    assert len(texts) == 20_000


def test_same_seed_gives_the_same_texts_and_another_seed_others() -> None:
    first, again, other = (
        [problem.text for problem in itertools.islice(problems(seed), 20)] for seed in (5, 5, 6)
    )
    assert first == again
    assert not set(first) & set(other)


def test_scoring_rejects_wrong_and_unfinished_solutions(sampled: list[Problem]) -> None:
    problem = sampled[0]
    body, _, answer = problem.solution.rpartition("\n")
    wrong = body + "\n" + answer.replace(str(problem.answer), str(problem.answer + 1))
    assert exact_share([problem, problem], [problem.solution, wrong]) == 0.5
    assert final_number(body) is None
    assert not in_form(body)
    assert not unhedged_sums_right("Step 1: 2 + 3 = 6.")
    assert not unhedged_sums_right("Step 1: 7 / 2 = 3.")
    assert unhedged_sums_right("Step 1: maybe 2 + 3 = 6.")


def test_drills_hold_many_right_sums_and_mark_their_results() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = sample_drill(rng)
        found = [pair for line in text.split("\n") for pair in sums(line)]
        assert len(found) >= 10
        assert all(right for _, right in found)
        marked = [text[start:stop] for start, stop in result_spans(text)]
        assert marked == [sum_.split(" = ")[1] + "." for sum_, _ in found]


def test_marked_results_are_those_that_a_step_must_compute(sampled: list[Problem]) -> None:
    for problem in sampled[:500]:
        marked = [problem.text[start:stop] for start, stop in result_spans(problem.text)]
        assert marked == [f"{value}." for value in problem.chain.values()[1:]]


def test_tokenizer_round_trip(sampled: list[Problem], tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    tokenizer.save(tmp_path)
    loaded = CharTokenizer.load(tmp_path)
    for problem in sampled:
        ids = tokenizer.encode(problem.text, bos=True, eos=True)
        assert len(ids) == len(problem.text) + 2
        assert max(ids) < len(tokenizer)
        assert ids == loaded.encode(problem.text, bos=True, eos=True)
        assert loaded.decode(ids) == problem.text


def test_tokenizer_names_an_unknown_character() -> None:
    with pytest.raises(ValueError, match="'~'"):
        CharTokenizer().encode("a~b")


def test_data_side_does_not_import_torch() -> None:
    code = (
        "import sys, traces.tiny, traces.tiny.data, traces.tiny.tokenizer, traces.tiny.drill\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_parts_of_a_batch_weigh_as_the_whole(sampled: list[Problem]) -> None:
    pytest.importorskip("torch")
    from traces.tiny.batching import Weights, make_batch

    texts, drill = sampled[:3], sample_drill(np.random.default_rng(0))
    batch = make_batch(texts, [drill], CharTokenizer(), Weights(question=0.0, result=2.0))
    for row, problem in zip(batch.weights[:3], texts, strict=True):
        digits = sum(len(str(value)) + 1 for value in problem.chain.values()[1:])
        # Every character of the solution and EOS once, and every result once more.
        assert row.sum() == len(problem.solution) + 1 + digits
    assert batch.weights[3].sum() == 2 * batch.results[3].sum()
    parts = [batch.part(rank, 2) for rank in range(2)]
    assert sum(float(part.weights.sum()) for part in parts) == pytest.approx(batch.total)
    assert parts[0].total == batch.total / 2


def test_sorted_experts_equal_the_library_and_its_gradients() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from traces.tiny.model import new_model

    model = new_model(CharTokenizer(), seed=0, num_hidden_layers=2, num_experts=8)
    ids = torch.randint(3, 70, (2, 40), generator=torch.Generator().manual_seed(0))
    results = []
    for implementation in ("greenroom_sorted", "eager"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss, *(param.grad.clone() for param in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from traces.tiny.batching import batches
    from traces.tiny.config import TrainConfig
    from traces.tiny.train import SMOKE_SIZES, Trainer

    monkeypatch.setattr(Trainer, "accuracy", lambda self: {})
    config = TrainConfig(batch=2, pool=2, steps=4, save_every=2, log_every=1)
    whole = Trainer(config, tmp_path / "whole", SMOKE_SIZES)
    (tmp_path / "whole").mkdir()
    whole.run()
    first = Trainer(config, tmp_path / "part", SMOKE_SIZES)
    (tmp_path / "part").mkdir()
    source = batches(config, first.tokenizer, 0)
    for _ in range(2):
        first._report(first.update(next(source)))
    second = Trainer(config, tmp_path / "part", SMOKE_SIZES)
    second.load()
    second.run()
    assert second.tokens == whole.tokens
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
