"""`/pooling`, `/classify`, `/score` and `/rerank`: request models and endpoints."""

# Generated from nbs/serving/pooling.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from minivllm.engine.outputs import RequestOutput
from minivllm.engine.pairs import Pairs, make_pairs
from minivllm.sampling.pooling import PoolingParams
from minivllm.serving.errors import ApiError
from minivllm.serving.generation import Plan, ServerState, Writer, answer, engine_prompts, plan_fields
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.protocol import ApiModel, Int64, RequestFields, as_list


class PooledFields(RequestFields):
    """Fields that all endpoints share. ``fixed``: parameters of `PoolingParams` with their values. ``names``: fields that become parameters."""

    unsupported: ClassVar = {"lora_request": ((), "name the adapter as the model")}
    n: ClassVar = 1
    stream: ClassVar = False
    fixed: ClassVar[dict[str, Any]] = {}
    names: ClassVar[tuple[str, ...]] = ("truncate_prompt_tokens",)

    truncate_prompt_tokens: Int64 | None = None

    def pooling_params(self) -> PoolingParams:
        """The request as PoolingParams. Raises InvalidParameter."""
        return PoolingParams(**self.fixed, **{name: getattr(self, name) for name in self.names})


class ActivatedFields(PooledFields):
    """Fields for models with a head, whose activation can be left out."""

    names: ClassVar[tuple[str, ...]] = (*PooledFields.names, "use_activation")

    use_activation: bool | None = None


class ClassificationRequest(ActivatedFields):
    """`POST /classify`."""

    fixed: ClassVar = {"task": "classify"}

    input: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True


class PoolingRequest(ActivatedFields):
    """`POST /pooling`: whatever the model makes of a prompt, or the ``task`` that is named."""

    names: ClassVar[tuple[str, ...]] = (*ActivatedFields.names, "task", "dimensions", "normalize", "pooling_type")

    input: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    pooling_type: Literal["mean", "cls", "last"] | None = None


class PairFields(ActivatedFields):
    """Fields of requests about pairs of texts."""

    fixed: ClassVar = {"task": "score"}


class ScoreRequest(PairFields):
    """`POST /score`. One ``text_1`` for all of ``text_2``, or as many."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(ApiModel):
    text: str


class RerankRequest(PairFields):
    """`POST /rerank`. ``return_documents``: as Jina's; by default the texts are in the answer, but for Cohere's `/v2/rerank`."""

    unsupported: ClassVar = {
        **PooledFields.unsupported,
        "max_tokens_per_doc": ((), "use truncate_prompt_tokens"),
        "max_chunks_per_doc": ((), "documents are not split"),
        "rank_fields": ((), "documents are texts"),
    }

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


@dataclass(frozen=True, kw_only=True)
class PairPlan(Plan):
    """A Plan for pairs of texts. pairs: how results become scores. documents: whether the texts are in the answer."""

    pairs: Pairs
    documents: bool = True


class PoolingWriter(Writer):
    """Writes the answer of `/pooling`: the pooled output of each prompt. ``listed``: the name of the list in the answer."""

    listed: ClassVar[str] = "data"

    def entry(self, i: int, output: RequestOutput) -> dict[str, Any]:
        """One prompt's part of the answer."""
        return {"index": i, "object": "pooling", "data": output.pooled}

    def entries(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """All parts."""
        return [self.entry(i, output) for i, output in enumerate(outputs)]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {**self._head("list"), self.listed: self.entries(outputs), "usage": usage}


class ClassificationWriter(PoolingWriter):
    """`/classify`: the most probable label, and all numbers."""

    def entry(self, i: int, output: RequestOutput) -> dict[str, Any]:
        probs = output.pooled or []
        labels = self.job.state.llm.config.model.pooling.labels
        label = labels[max(range(len(probs)), key=probs.__getitem__)]
        return {"index": i, "label": label, "probs": probs, "num_classes": len(probs)}


class ScoreWriter(PoolingWriter):
    """`/score`: a number for each pair."""

    def entries(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        scores = self.plan.pairs.scores([output.pooled for output in outputs])
        return [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]


class RerankWriter(PoolingWriter):
    """`/rerank`: the best documents first."""

    listed = "results"

    def entries(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        scores, texts = self.plan.pairs.scores([output.pooled for output in outputs]), self.body.texts()
        best = sorted(range(len(texts)), key=lambda i: -scores[i])[: self.body.top_n]
        shown = [{"document": {"text": text}} if self.plan.documents else {} for text in texts]
        return [{"index": i, "relevance_score": scores[i]} | shown[i] for i in best]


async def plan_inputs(body: Any, request: Request, state: ServerState, prefix: str) -> Plan:
    """Check a body and make its prompts. Raises ApiError, InvalidParameter."""
    inputs = as_list(body.input)
    if not inputs:
        raise ApiError(400, "input: an empty list; give at least one input", param="input")
    prompts = await engine_prompts(body, inputs, state)
    return Plan(**plan_fields(body, state, request, prefix), params=body.pooling_params(), prompts=prompts)


async def _plan_pairs(
    body: Any, request: Request, state: ServerState, texts: tuple[Any, Any], *, documents: bool = True
) -> PairPlan:
    """Check a body with pairs of texts and make their prompts. Raises ApiError, InvalidParameter, ValueError."""
    first, second = ([text] if isinstance(text, str) else text for text in texts)
    state.check_room(len(first) + len(second))
    fields, params = plan_fields(body, state, request, "score"), body.pooling_params()
    engine, keep = state.llm.llm_engine, params.truncate_prompt_tokens
    keep = None if keep is None else engine.input_processor.num_kept(keep)
    facts = engine.config.model.pooling
    pairs = await state.llm.run_input(lambda: make_pairs(engine.tokenizer, facts, first, second, keep))
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    prompts = [prompt | salt for prompt in pairs.prompts]
    return PairPlan(**fields, params=params, prompts=prompts, pairs=pairs, documents=documents)


def pooling_router(state: ServerState) -> APIRouter:
    """The endpoints of this module."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/pooling", response_model=None)
    async def create_pooling(body: PoolingRequest, request: Request) -> dict[str, Any] | Response:
        """What the model makes of each input."""
        return await answer(request, state, body.model, plan_inputs(body, request, state, "pool"), PoolingWriter)

    @router.post("/classify", response_model=None)
    async def create_classify(body: ClassificationRequest, request: Request) -> dict[str, Any] | Response:
        """Class probabilities of each input."""
        plan = plan_inputs(body, request, state, "classify")
        return await answer(request, state, body.model, plan, ClassificationWriter)

    @router.post("/score", response_model=None)
    @router.post("/v1/score", response_model=None)
    async def create_score(body: ScoreRequest, request: Request) -> dict[str, Any] | Response:
        """A score for each pair of texts."""
        plan = _plan_pairs(body, request, state, (body.text_1, body.text_2))
        return await answer(request, state, body.model, plan, ScoreWriter)

    @router.post("/rerank", response_model=None)
    @router.post("/v1/rerank", response_model=None)
    @router.post("/v2/rerank", response_model=None)
    async def create_rerank(body: RerankRequest, request: Request) -> dict[str, Any] | Response:
        """Documents in the order of their relevance to a query, as Jina's and Cohere's clients expect it."""
        shown = body.return_documents
        shown = shown if shown is not None else not request.url.path.startswith("/v2/")
        plan = _plan_pairs(body, request, state, (body.query, body.texts()), documents=shown)
        return await answer(request, state, body.model, plan, RerankWriter)

    return router
