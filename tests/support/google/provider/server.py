"""The stand-in as a gRPC server in the test's own process."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path

import grpc
from tf.gen import grpc_controller_pb2 as controller_pb
from tf.gen import grpc_controller_pb2_grpc as controller_rpc
from tf.gen import grpc_stdio_pb2_grpc as stdio_rpc
from tf.gen import tfplugin_pb2_grpc as rpc

from tests.support.google.provider.servicer import Google
from tests.support.google.provider.store import Store

LARGEST = 64 * 1024 * 1024  # bytes of one message
# A socket's path may be too long in a test's folder.
ADDRESS = "127.0.0.1"


class Controller(controller_rpc.GRPCControllerServicer):  # type: ignore[misc]
    """Goes on when Terraform is through with the provider."""

    def Shutdown(self, request: object, context: object) -> object:
        return controller_pb.Empty()


class Stdio(stdio_rpc.GRPCStdioServicer):  # type: ignore[misc]
    """Terraform asks for it; there is nothing to stream."""

    def StreamStdio(self, request: object, context: object) -> object:
        return iter(())


class Server:
    """The provider at ``version`` on ``port`` of the loopback, whose cloud is the file ``cloud``."""

    def __init__(self, version: str, cloud: Path) -> None:
        limits = [("grpc.max_send_message_length", LARGEST), ("grpc.max_receive_message_length", LARGEST)]
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=32), options=limits)
        rpc.add_ProviderServicer_to_server(Google(version, Store(cloud)), self._server)
        controller_rpc.add_GRPCControllerServicer_to_server(Controller(), self._server)
        stdio_rpc.add_GRPCStdioServicer_to_server(Stdio(), self._server)
        self.port = self._server.add_insecure_port(f"{ADDRESS}:0")
        self._server.start()
