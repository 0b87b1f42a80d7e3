"""A real server: Ray, three processes, the real model; one for all end-to-end tests."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from loadtest.cluster import free_port
from loadtest.server import running_server
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    """How the tests reach it."""

    http: str
    grpc_address: str
    model: str
    spans: list[Span]
    logs: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0)

    def stub(self) -> pb_grpc.InferenceStub:
        return pb_grpc.InferenceStub(grpc.insecure_channel(self.grpc_address))

    def info(self) -> dict[str, Any]:
        """The processes behind the server, by role."""
        response = self.stub().Info(pb.InfoRequest(), timeout=30)
        return {process.role: process for process in response.processes}


class Collector(TraceServiceServicer):
    """An OTLP collector: `spans` are all that have come."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def Export(
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()


@contextlib.contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its address."""
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"http://127.0.0.1:{port}"
    server.stop(0)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = yaml.safe_load((ROOT / "deployments.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["grpc_options"]["port"] = free_port()
    folder = tmp_path_factory.mktemp("server")
    config["logging_config"] = {"encoding": "JSON", "logs_dir": str(folder / "logs")}
    path = folder / "deployments.yaml"
    path.write_text(yaml.safe_dump(config))
    with collector() as (traces, address):
        environment = {
            "RAY_metrics_report_interval_ms": "1000",
            "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "deployments.tracing:exporters",
            # Only those whose callers trace.
            "RAY_SERVE_TRACING_SAMPLING_RATIO": "0",
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        log = folder / "server.log"
        with running_server(None, path, log, environment) as base:
            yield Server(
                http=base,
                grpc_address=f"127.0.0.1:{config['grpc_options']['port']}",
                model=config["applications"][0]["args"]["model_id"],
                spans=traces.spans,
                logs=folder / "logs",
            )
