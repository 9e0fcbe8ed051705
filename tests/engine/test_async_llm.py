"""Many callers and one engine: each gets its own tokens, none is left waiting, nothing leaks."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import tiny_model_path

from minivllm import AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from minivllm.core.policy import FCFS
from minivllm.core.request import Request
from minivllm.engine.async_llm import EngineDeadError
from minivllm.sampling.params import RequestOutputKind
from minivllm.sampling.pooling import PoolingParams

__all__ = ["tiny_model_path"]

DELTA = RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def args(tiny_model_path: Any) -> EngineArgs:
    return EngineArgs(model=str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=64, max_num_seqs=8)


@pytest.fixture
def make(args: EngineArgs) -> Iterator[Callable[[], AsyncLLM]]:
    made: list[AsyncLLM] = []

    def one() -> AsyncLLM:
        made.append(AsyncLLM.from_engine_args(args))
        return made[-1]

    yield one
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request: pytest.FixtureRequest, args: EngineArgs) -> Iterator[AsyncLLM]:
    """One engine for several tests, which leave nothing behind."""
    shared = AsyncLLM.from_engine_args(args, engine_in=request.param)
    yield shared
    shared.shutdown()


async def is_at_rest(llm: AsyncLLM) -> bool:
    """Whether within two seconds no request is left anywhere and no block is held."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(200):
        unfinished = await llm.call(lambda engine: engine.get_num_unfinished_requests())
        if not (llm.num_unfinished or unfinished or any(llm.get_metrics()[name] for name in names)):
            return True
        await asyncio.sleep(0.01)
    return False


async def text_of(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> str:
    pieces = [output.outputs[0].text async for output in llm.generate(prompt, params)]
    return "".join(pieces) if params.output_kind is DELTA else pieces[-1]


def test_together_as_alone(llm: AsyncLLM):
    wishes = [
        (f"prompt {i}" * (1 + i % 3), SamplingParams(temperature=i % 2, seed=i, max_tokens=3 + i, output_kind=kind))
        for i in range(12)
        for kind in (DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    ]

    async def run():
        alone = [await text_of(llm, *wish) for wish in wishes]
        return alone, await asyncio.gather(*(text_of(llm, *wish) for wish in wishes)), await is_at_rest(llm)

    alone, together, rest = asyncio.run(run())
    assert together == alone and all(alone) and rest


def test_drafts_change_no_text(request: pytest.FixtureRequest, args: EngineArgs, llm: AsyncLLM):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "dynamic_length": False}
    drafting = AsyncLLM.from_engine_args(
        replace(args, speculative_config=config), engine_in=request.node.callspec.params["llm"]
    )
    params = [SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=30, ignore_eos=True) for i in range(6)]

    async def run(engine: AsyncLLM) -> list[str]:
        return await asyncio.gather(*(text_of(engine, "ab " * (i + 1), each) for i, each in enumerate(params)))

    try:
        assert asyncio.run(run(drafting)) == asyncio.run(run(llm))
        assert drafting.get_metrics()["spec_decode_num_draft_tokens"] > 0 and asyncio.run(is_at_rest(drafting))
    finally:
        drafting.shutdown()


def test_two_loops_in_two_threads(llm: AsyncLLM):
    got: dict[str, str] = {}
    params = SamplingParams(temperature=0, max_tokens=30)
    threads = [
        threading.Thread(target=lambda name=name: got.setdefault(name, asyncio.run(text_of(llm, name, params))))
        for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {name: asyncio.run(text_of(llm, name, params)) for name in "ab"}


def test_whoever_leaves_is_forgotten(llm: AsyncLLM):
    params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=DELTA)

    async def leaves():
        async for _ in llm.generate("abc", params):
            break

    async def run():
        cancelled = asyncio.create_task(text_of(llm, "abc", params))
        at_once = asyncio.create_task(text_of(llm, "abc", params))
        await leaves()
        at_once.cancel()
        cancelled.cancel()
        await asyncio.gather(cancelled, at_once, return_exceptions=True)
        return await is_at_rest(llm)

    assert asyncio.run(run())


def test_abort_ends_the_stream(llm: AsyncLLM):

    async def run():
        stream = await llm.submit("abc", SamplingParams(max_tokens=200, ignore_eos=True), "mine")
        await anext(stream)
        await llm.abort("mine")
        await llm.abort("nobody")
        return [output async for output in stream][-1]

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"


def test_bad_input_is_the_callers_error(llm: AsyncLLM):

    async def run():
        with pytest.raises(ValueError, match="empty"):
            await llm.submit("", SamplingParams())
        with pytest.raises(TypeError):
            await llm.submit("abc", {"temperature": 0})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="regex|parse|unclosed|class"):
            await llm.submit("abc", SamplingParams(structured_outputs={"regex": "(["}))  # type: ignore[arg-type]
        stream = await llm.submit("abc", SamplingParams(max_tokens=100, ignore_eos=True), "mine")
        with pytest.raises(ValueError, match="in use"):
            await llm.submit("abc", SamplingParams(), "mine")
        await stream.aclose()
        return await text_of(llm, "abc", SamplingParams(max_tokens=3))

    assert asyncio.run(run())


def test_everybody_hears_of_the_death(make: Callable[[], AsyncLLM]):
    llm = make()
    told: list[BaseException] = []
    llm.on_death = told.append

    def cut(output: Any) -> None:
        raise OSError("the wire was cut")

    async def run():
        params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=DELTA)
        streams = [await llm.submit("abc", params) for _ in range(12)]  # more than can run at once
        await anext(streams[0])
        await llm.call(lambda engine: setattr(engine.core.executor, "execute_model", cut))
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the wire was cut") as caught:
                async for _ in stream:
                    pass
            assert isinstance(caught.value.__cause__, OSError)
        for late in (llm.submit("abc", params), llm.reset_prefix_cache(), llm.abort("x")):
            with pytest.raises(EngineDeadError):
                await late

    asyncio.run(run())
    llm.shutdown()
    assert [str(error) for error in told] == ["the wire was cut"]
    with pytest.raises(EngineDeadError):
        llm.check_health()


def test_shutdown_tells_those_who_wait(make: Callable[[], AsyncLLM]):
    llm = make()

    async def run():
        stream = await llm.submit("abc", SamplingParams(max_tokens=200, ignore_eos=True))
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass

    asyncio.run(run())
    llm.shutdown()
    assert not llm.errored


def test_a_vector(llm: AsyncLLM):
    async def main():
        stream = await llm.submit([64, 65, 66], PoolingParams(dimensions=8))
        (output,) = [output async for output in stream]
        words = await text_of(llm, [64, 65, 66], SamplingParams(temperature=0, max_tokens=4))
        with pytest.raises(ValueError, match="dimensions"):
            await llm.submit([64], PoolingParams(dimensions=1000))
        assert await is_at_rest(llm)
        return output, words

    output, words = asyncio.run(main())
    assert output.finished and output.outputs == [] and len(output.pooled) == 8 and words
    assert sum(x * x for x in output.pooled) == pytest.approx(1, abs=1e-6)


class Raises(FCFS):
    def order(self, waiting, view):
        raise KeyError("a bug")


def test_a_policy_that_raises_costs_no_request(make: Callable[[], AsyncLLM], caplog: pytest.LogCaptureFixture):
    llm, params = make(), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def main():
        alone = await text_of(llm, [64], params)
        running = asyncio.ensure_future(text_of(llm, [64], params))
        await llm.call(lambda engine: engine.set_policy(Raises()))
        return alone, await asyncio.wait_for(asyncio.gather(running, text_of(llm, [64], params)), 20)

    alone, texts = asyncio.run(main())
    assert texts == [alone, alone] and not llm.errored
    assert "a bug" in str(llm.policy_error) and "policy has failed" in caplog.text
    assert type(llm.llm_engine.core.scheduler.policy) is FCFS


def test_a_prompt_that_never_fits_fails_alone_when_its_grammar_is_ready(args: EngineArgs):
    """The scheduler sees it only then; requests that run meanwhile go on."""
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("fits", [64], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    wish = SamplingParams(structured_outputs={"regex": "[a-z]{5}"})
    engine.core.add_request(Request("never", [64] * 2000, max_tokens=5, sampling_params=wish))
    ends = []
    while engine.core.has_requests():
        ends += [output for output in engine.core.step() if output.finish_reason is not None]
    assert [(end.request_id, str(end.finish_reason)) for end in ends] in (
        [("never", "error"), ("fits", "length")],
        [("fits", "length"), ("never", "error")],
    )
    assert "too long" in next(end.error for end in ends if end.error)
    assert engine.core.scheduler.kv_cache_manager.block_pool.usage == 0
    engine.close()


@pytest.mark.parametrize("logprobs", [None, 1])
def test_what_a_slow_reader_gets_is_joined(llm: AsyncLLM, logprobs: int | None):
    params = SamplingParams(
        n=2, temperature=1, seed=5, max_tokens=30, ignore_eos=True, output_kind=DELTA, logprobs=logprobs
    )

    async def run(slowly: bool) -> tuple[int, list[Any]]:
        stream = await llm.submit("abc", params)
        if slowly:
            await anext(stream_end := llm.generate("abc", params.clone(output_kind=RequestOutputKind.FINAL_ONLY)))
            await stream_end.aclose()
        answers: dict[int, list[Any]] = {}
        count = 0
        async for output in stream:
            count += 1
            for piece in output.outputs:
                sofar = answers.setdefault(piece.index, ["", [], [], [], None, None])
                sofar[0] += piece.text
                sofar[1] += piece.token_ids
                sofar[2] += piece.text_offsets or []
                sofar[3] += [entry.keys() for entry in piece.logprobs or []]
                sofar[4], sofar[5] = piece.cumulative_logprob, piece.finish_reason
        return count, [answers[i] for i in sorted(answers)]

    (many, quick), (few, slow) = asyncio.run(run(False)), asyncio.run(run(True))
    assert few <= 2 < many and slow == quick
    assert all(len(answer[1]) == 30 and answer[5] == "length" for answer in slow)
