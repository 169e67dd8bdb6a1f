# SPDX-License-Identifier: Apache-2.0
"""The contract as grpcio-tools compiles it, for tests that send what no client of ours would."""
import importlib
import sys

import grpc_tools
from grpc_tools import protoc

from support.servers import ROOT


def generated_modules(directory):
    """The modules of attend.proto (messages, stubs), generated into `directory`, which stays on sys.path."""
    code = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{grpc_tools.__path__[0]}/_proto",
                        f"--python_out={directory}", f"--grpc_python_out={directory}", "attend/v1/attend.proto"])
    assert code == 0, "grpc_tools.protoc failed"
    sys.path.insert(0, str(directory))
    return tuple(importlib.import_module(f"attend.v1.{name}") for name in ("attend_pb2", "attend_pb2_grpc"))
