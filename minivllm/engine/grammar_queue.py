"""Requests whose grammar is still being compiled."""

# Generated from nbs/engine/grammar_queue.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Iterable
from typing import Any

from minivllm.core.output import EngineCoreOutput
from minivllm.core.request import FinishReason, Request
from minivllm.sampling.grammar import GrammarCompiler, GrammarError, PendingGrammar

__all__ = ["GrammarQueue", "wants_grammar"]


# %% nbs/engine/grammar_queue.ipynb #GrammarQueue
class GrammarQueue:
    """Requests whose grammar is being compiled."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._waiting: dict[str, tuple[Request, PendingGrammar]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: Request) -> None:
        """Begin to compile the grammar that the request's parameters ask for."""
        wish = request.sampling_params.structured_outputs
        self._waiting[request.request_id] = (request, self.compiler.submit(wish))

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; returns those that were here."""
        return [request_id for request_id in request_ids if self._waiting.pop(request_id, None) is not None]

    def take_ready(self, wait: bool) -> tuple[list[Request], list[EngineCoreOutput]]:
        """Requests whose grammar is compiled, in the order of arrival, and the last outputs of those whose grammar is wrong.

        With ``wait``, when there is nothing else to do, the first one is waited for.
        """
        ready: list[Request] = []
        failed: list[EngineCoreOutput] = []
        for request_id, (request, pending) in list(self._waiting.items()):
            if not pending.done() and not wait:
                continue
            wait = False
            del self._waiting[request_id]
            try:
                pending.result()
                ready.append(request)
            except GrammarError as error:
                failed.append(EngineCoreOutput(request_id, [], FinishReason.ERROR, error=str(error)))
        return ready, failed


def wants_grammar(params: Any) -> bool:
    """Whether a request with these parameters needs a grammar."""
    return getattr(params, "structured_outputs", None) is not None
