"""REST against its own OpenAPI document: generated requests get no 5xx and no answer that is not documented."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from schemathesis.specs.openapi.checks import positive_data_acceptance

from hpcaccel import Client
from hpcaccel.service.service_settings import ServiceSettings
from tests.service.conftest import SPEC, TOKEN, until

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def document(settings: ServiceSettings) -> Any:
    with settings.client() as client:
        made = client.submit(SPEC, cluster="local")
        until(lambda: client.run(made.run_id).state == "completed")
    return schemathesis.openapi.from_url(f"{settings.url}/api/v1/openapi.json", headers=HEADERS, timeout=180)


def test_generated_requests_get_documented_answers(document: Any) -> None:
    assert check_operations(document, each=4) >= 30


@pytest.mark.chaos
def test_many_generated_requests_get_documented_answers(document: Any) -> None:
    assert check_operations(document, each=150) >= 30


def check_operations(document: Any, *, each: int) -> int:
    """Send ``each`` generated requests to each operation. Returns the number of operations.

    Streams have no end while a run goes on: they have tests of their own.
    """
    found = [result.ok() for result in document.get_all_operations()]
    operations = [operation for operation in found if not operation.path.endswith("/stream")]
    for operation in operations:

        @given(case=operation.as_strategy())
        @examples(
            max_examples=each, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
        )
        def send(case: Any) -> None:
            case.call_and_validate(headers=HEADERS, timeout=60, excluded_checks=[positive_data_acceptance])

        send()
    return len(operations)


def test_every_route_documents_its_errors(client: Client) -> None:
    document = client._get("openapi.json")
    assert "SpecRequest" in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert {"401", "404", "422"} <= operation["responses"].keys(), (method, path)
            assert operation["security"], (method, path)
