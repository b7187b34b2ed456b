"""The process that Terraform starts: ``python -m tests.support.google.provider VERSION CLOUD-FILE``."""

from __future__ import annotations

import base64
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
from tf.gen import grpc_controller_pb2 as controller_pb
from tf.gen import grpc_controller_pb2_grpc as controller_rpc
from tf.gen import grpc_stdio_pb2_grpc as stdio_rpc
from tf.gen import tfplugin_pb2_grpc as rpc

from tests.support.google.provider.certificate import certificate
from tests.support.google.provider.servicer import Google
from tests.support.google.provider.store import Store

LARGEST = 64 * 1024 * 1024  # bytes of one message


class Controller(controller_rpc.GRPCControllerServicer):  # type: ignore[misc]
    """Ends the process when Terraform is through with it."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def Shutdown(self, request: object, context: object) -> object:
        self.done.set()
        return controller_pb.Empty()


class Stdio(stdio_rpc.GRPCStdioServicer):  # type: ignore[misc]
    """Terraform asks for it; there is nothing to stream."""

    def StreamStdio(self, request: object, context: object) -> object:
        return iter(())


def main(version: str, cloud: Path) -> None:
    """Serve until Terraform says that it is enough."""
    controller = Controller()
    limits = [("grpc.max_send_message_length", LARGEST), ("grpc.max_receive_message_length", LARGEST)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16), options=limits)
    rpc.add_ProviderServicer_to_server(Google(version, Store(cloud)), server)
    controller_rpc.add_GRPCControllerServicer_to_server(controller, server)
    stdio_rpc.add_GRPCStdioServicer_to_server(Stdio(), server)
    own = certificate(Path.home())
    port = server.add_secure_port("127.0.0.1:0", own.credentials)  # a socket's path may be too long here
    server.start()
    encoded = base64.b64encode(own.chain).decode().rstrip("=")
    print(f"1|6|tcp|127.0.0.1:{port}|grpc|{encoded}", flush=True)  # noqa: T201 - the handshake
    controller.done.wait()
    server.stop(grace=0.5).wait()


main(sys.argv[1], Path(sys.argv[2]))
