"""A real server: Ray, three processes, the real model; one for all end-to-end tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import yaml

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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = yaml.safe_load((ROOT / "deployments.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["grpc_options"]["port"] = free_port()
    folder = tmp_path_factory.mktemp("server")
    path = folder / "deployments.yaml"
    path.write_text(yaml.safe_dump(config))
    with running_server(None, path, folder / "server.log") as base:
        yield Server(
            http=base,
            grpc_address=f"127.0.0.1:{config['grpc_options']['port']}",
            model=config["applications"][0]["args"]["model_id"],
        )
