"""The document that describes the server is valid, and no request made from it is the server's fault."""

from collections import Counter
from typing import Any

import hypothesis
import pytest
from live_server import LiveServer, live_server
from openapi_spec_validator import validate

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions


def test_the_document_is_valid(tiny: LiveServer):
    document = tiny.get("/openapi.json").json()
    validate(document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("summary") and operation.get("responses"), (method, path)


def generated(server: LiveServer, examples: int) -> tuple[Counter[int], list[str]]:
    """Statuses of this many requests for each operation, and the faults among them."""
    import schemathesis  # takes a second, and only `make load` needs it

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and "max_tokens" in case.body and isinstance(case.body["max_tokens"], int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 8)
            response = case.call(timeout=60)
            statuses[response.status_code] += 1
            if response.status_code >= 500:
                faults.append(
                    f"{case.method} {case.path} {str(case.body)[:300]} -> {response.status_code} {response.text[:200]}"
                )

        send()
    return statuses, faults


@pytest.mark.load
def test_two_thousand_generated_requests(tiny_args: EngineArgs):
    options = ServerOptions(request_timeout=20)
    with live_server(tiny_args, options) as server:
        operations = sum(len(methods) for methods in server.get("/openapi.json").json()["paths"].values())
        with_body = sum("post" in methods for methods in server.get("/openapi.json").json()["paths"].values())
        statuses, faults = generated(server, 2000 // with_body)
        assert faults == []
        assert sum(statuses.values()) >= 2000, (statuses, operations)
        assert statuses[200] and statuses[400]
        assert server.wait_at_rest(60)
