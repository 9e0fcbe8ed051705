"""Questions about a run: each answer is what the trace says happened, and the page grades as Python does."""

import pytest
from viz_traces import make_trace

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler, VirtualClock
from minivllm.viz import Predict
from minivllm.viz.predict import KINDS, questions


@pytest.fixture(scope="module")
def trace():
    return make_trace(48, 120, budget=32, seqs=10)


@pytest.mark.parametrize("swap", [0, 16])
def test_the_answers_are_what_happened(swap):
    trace = make_trace(48, 120, budget=32, seqs=10, swap=swap)
    asked = questions(trace, most=10_000)
    assert {q.kind for q in asked} == set(KINDS)
    steps = {kind: [] for kind in ("preempt", "evict")}
    step = -1
    for event in trace.events:
        step += event[0] == "step"
        if event[0] in steps:
            steps[event[0]].append((step, event[1]))
    for question in asked:
        answer = question.options[question.answer]
        assert 0 <= question.answer < len(question.options) == len(set(question.options))
        if question.kind == "preempted":
            assert (question.step, answer) in steps["preempt"]
        elif question.kind == "evicted":
            assert (question.step, int(answer.removeprefix("block "))) in steps["evict"]
    assert sum(q.kind == "preempted" for q in asked) == len(steps["preempt"])


def test_steps_of_a_prompt_are_counted_by_hand(trace):
    scheduled, step = {}, -1
    for event in trace.events:
        step += event[0] == "step"
        if event[0] == "schedule":
            scheduled |= {(request, step): n for request, n in event[1].items()}
    for question in questions(trace, ["steps"], most=100):
        request, *_, total = question.situation[0].removesuffix(" prompt tokens to compute.").split()
        left, step, count = int(total), question.step, 0
        while left > 0:
            count += (request, step) in scheduled
            left -= scheduled.get((request, step), 0)
            step += 1
        assert int(question.options[question.answer].split()[0]) == count


def test_grades(trace):
    question = questions(trace)[0]
    wrong = next(i for i in range(len(question.options)) if i != question.answer)
    assert question.grade(question.answer).startswith("right: ")
    assert question.grade(wrong).startswith(f"no, {question.options[question.answer]}: ")
    with pytest.raises(IndexError, match="0 to"):
        question.grade(len(question.options))
    with pytest.raises(ValueError, match="unknown kind guess; there are preempted, evicted, steps"):
        questions(trace, ["guess"])


def test_a_run_without_turning_points_says_so():
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(4, 40), clock=VirtualClock())
    trace = scheduler.record()
    assert "Nothing happened" in Predict(trace).problem
    scheduler.schedule()
    assert "no turning points" in Predict(trace).problem


def test_the_page_asks_grades_and_moves_the_cursor(trace, open_page, tmp_path):
    view = Predict(trace)
    page = open_page(view.save(tmp_path / "predict.html"))
    question = view.questions[0]
    wrong = next(i for i in range(len(question.options)) if i != question.answer)
    page.get_by_role("button", name="Check").click()
    assert page.locator(".mv-predict-verdict").inner_text() == "Choose one first."
    page.get_by_label(question.options[wrong], exact=True).check()
    page.get_by_role("button", name="Check").click()
    assert page.locator(".mv-predict-verdict").inner_text() == "✗ " + question.grade(wrong).replace("no,", "No,")
    page.get_by_role("button", name="next question").click()
    second = view.questions[1]
    page.get_by_label(second.options[second.answer], exact=True).check()
    page.get_by_role("button", name="Check").click()
    assert page.locator(".mv-predict-verdict").inner_text().startswith("✓ Right: ")
    assert f"1 of 2 right, {len(view.questions)} questions" in page.content()
    page.get_by_role("button", name="previous question").click()
    assert page.locator(".mv-predict-verdict").inner_text().startswith("✗ No")
    step = page.evaluate("[...globalThis.minivllmCursors.values()][0].step")
    assert step == view.questions[1].step
