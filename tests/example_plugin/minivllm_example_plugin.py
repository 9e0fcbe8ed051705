"""One of everything that a plugin can add to minivllm. Copy it, and keep what you need."""

from pathlib import Path
from typing import Any

from minivllm.attention.sdpa import SDPABackend
from minivllm.attention.select import register_backend
from minivllm.core.policy import FCFS, register_policy
from minivllm.core.speculative import SpeculativeConfig, register_proposer
from minivllm.lab.readers import register_reader
from minivllm.lab.workload import Workload, WorkloadRequest
from minivllm.lora.adapter import LoRARequest
from minivllm.lora.resolver import register_lora_resolver
from minivllm.models.linear.layer import TorchLinear, register_linear_method, register_quantization
from minivllm.models.spec import ConfigReader, DecoderSpec, family, llama
from minivllm.runtime.executor import UniProcExecutor
from minivllm.runtime.executors.select import register_executor
from minivllm.sampling.transforms import register_transform
from minivllm.viz import register_view
from minivllm.viz.timeline import Timeline


class ExampleBackend(SDPABackend):
    """An attention backend: torch's, and a linear method that goes with it."""

    name = "example"
    linear_method = "example"


class ExampleLinear(TorchLinear):
    """A linear method."""


class ExampleRounded(TorchLinear):
    """A quantization: weights are rounded when they are loaded."""

    def process_weights_after_loading(self) -> None:
        self.weights["weight"].copy_(self.weights["weight"].bfloat16())


class LastInFirstOut(FCFS):
    """A scheduling policy."""

    def order(self, waiting: Any, view: Any) -> Any:
        return list(reversed(waiting))


class Only:
    """A transform of logits: the token that a request names is the only one left. `{"example_only": 7}` in `extra_args`."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, logits: Any, view: Any) -> Any:
        kept = logits[self.token].clone()
        logits.fill_(float("-inf"))
        logits[self.token] = kept
        return logits


class Successor:
    """A proposer of draft tokens: the next token is the last one plus one."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.most = config.num_speculative_tokens

    def propose(self, requests: Any, view: Any) -> list[list[int]]:
        return [[int(r.token_ids[-1]) + 1 + i for i in range(min(self.most, r.most))] for r in requests]


class ExampleExecutor(UniProcExecutor):
    """An executor."""


class ExampleResolver:
    """A LoRA resolver: every name that begins with `my-` is the adapter in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return LoRARequest(lora_name, 1, self.folder) if lora_name.startswith("my-") else None


class ExampleView(Timeline):
    """A view of a trace."""


def example_model(r: ConfigReader) -> DecoderSpec:
    """A model family: Llama under another name."""
    return llama(r)


def read_example(path: Path) -> Workload:
    """A workload reader: a line for each request, `arrival prompt-tokens answer-tokens`."""
    rows = [line.split() for line in path.read_text().splitlines()[1:]]
    return Workload.of(
        WorkloadRequest(f"{i}", float(at), (range(1, int(prompt) + 1),), range(1, int(answer) + 1))
        for i, (at, prompt, answer) in enumerate(rows)
    )


def register_parsers() -> None:
    """Parsers of tool calls and of reasoning. They are the server's, which may not be installed."""
    try:
        from minivllm.serving.reasoning import ReasoningParser, register_reasoning_parser
        from minivllm.serving.tool_parsers import HermesToolParser
        from minivllm.serving.tools import register_tool_parser
    except ImportError:
        return

    @register_tool_parser("example")
    class ExampleToolParser(HermesToolParser):
        """How a model writes calls."""

    @register_reasoning_parser("example")
    class ExampleReasoningParser(ReasoningParser):
        """How a model marks its thoughts."""

        start, end_mark = "<plan>", "</plan>"


def register() -> None:
    """What the entry point names: called once in each process that makes an engine."""
    family("ExampleForCausalLM", "example")(example_model)
    register_backend("example", ExampleBackend)
    register_linear_method("example", ExampleLinear)
    register_quantization("example_rounded", ExampleRounded, bits=32)
    register_policy("example", LastInFirstOut)
    register_transform("example_only", Only)
    register_proposer("example", Successor)
    register_executor("example", ExampleExecutor)
    register_reader("example", lambda begin: begin.startswith("# example"), read_example)
    register_lora_resolver("example", ExampleResolver)
    register_view("ExampleView", "minivllm_example_plugin")
    register_parsers()
