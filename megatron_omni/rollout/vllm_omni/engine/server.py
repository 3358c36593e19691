"""An engine's process: `python -m megatron_omni.rollout.vllm_omni.engine.server --model-path ...`.

Serves one engine over HTTP, with JSON for small things and `megatron_omni.wire` messages for samples:

- GET /health: {"engine_id", "weight_version", "model_version", "asleep"}; 500 if a worker is gone. Answers
  while sampling.
- POST /generate: a `SampleRequest` → the sample's tensors. Many at a time are sampled together.
- POST /sleep, POST /wake.
- POST /weights/begin, then /weights/bucket for each, then /weights/end: see `Engine`.

Errors are {"error": message}, with status 400 for what the caller did wrong and 500 for a failure.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron_omni import wire
from megatron_omni.errors import UserError
from megatron_omni.platforms import current_platform
from megatron_omni.ports import free_port
from megatron_omni.rollout.vllm_omni import cpu

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
GRACE = 20.0
"""Seconds that shutting down may take before the process is killed."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="samples that take a step together")
    parser.add_argument("--ready-file", type=Path, required=True, help='gets {"url": ...} when all is ready')
    parser.add_argument("--parent", type=int, help="process with which this one ends")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        if arguments.parent is not None:
            end_with(arguments.parent)
        serve(arguments)
    except UserError as error:
        fail(str(error))
    except Exception as error:
        fail(
            f"{' '.join(str(error).split()) or repr(error)} The cause stands above, in what its workers say."
        )


def fail(reason: str) -> None:
    print(f"the rollout engine cannot start: {reason}", file=sys.stderr)
    for worker in multiprocessing.active_children():
        worker.kill()  # one that waits for another that has failed heeds nothing else
    sys.exit(2)


def end_with(parent: int) -> None:
    """Shut down when the process `parent` ends."""
    try:
        process = os.pidfd_open(parent)
    except ProcessLookupError:
        raise UserError(f"the parent process {parent} is gone.") from None

    def watch() -> None:
        select.select([process], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # a worker that hangs would stay
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def serve(arguments: argparse.Namespace) -> None:
    prepare_environment()
    check_model(arguments.model_path, arguments.tensor_parallel_size)
    with socket.create_server((arguments.host, arguments.port)) as listener:
        asyncio.run(run(arguments, listener))


def check_model(folder: Path, workers: int) -> None:
    """Raises `UserError` for a folder that holds no model, or one that `workers` cannot share."""
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{str(folder)!r} is no diffusers folder: it has no model_index.json.")
    heads = json.loads((folder / "transformer/config.json").read_text())["num_attention_heads"]
    if heads % workers:
        raise UserError(
            f"tensor_parallel_size {workers} does not divide the model's {heads} attention heads."
        )


def prepare_environment() -> None:
    """Must come before the first import of vLLM."""
    defaults = ENVIRONMENT | (cpu.ENVIRONMENT if current_platform().name == "cpu" else {})
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["MASTER_PORT"] = str(free_port())  # the workers', who come to use it much later


async def run(arguments: argparse.Namespace, listener: socket.socket) -> None:
    import uvicorn

    from megatron_omni.rollout.vllm_omni.engine.engine import Engine

    engine = Engine(
        arguments.model_path, arguments.dtype, arguments.tensor_parallel_size, arguments.max_num_seqs
    )
    try:
        host, port = listener.getsockname()[:2]
        write_ready_file(arguments.ready_file, f"http://{host}:{port}")
        options = uvicorn.Config(application(engine), log_level="warning", timeout_graceful_shutdown=1)
        await uvicorn.Server(options).serve(sockets=[listener])
    finally:
        engine.omni.shutdown()
        gc.freeze()  # or the interpreter would look through all of vLLM for garbage, for seconds


def write_ready_file(path: Path, url: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"url": url}))
    partial.replace(path)


def application(engine: Any) -> Any:
    """The HTTP interface of an `Engine`, as an ASGI application."""
    from fastapi import Body, FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from vllm_omni.errors import OmniClientError

    from megatron_omni.rollout.vllm_omni.engine.engine import RefusedError, Update
    from megatron_omni.rollout.vllm_omni.protocol import SampleRequest

    app = FastAPI()

    @app.exception_handler(RefusedError)
    @app.exception_handler(OmniClientError)
    async def refused(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        faults = (f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
        return JSONResponse({"error": "; ".join(faults)}, 400)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error) or repr(error)}, 500)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return await engine.health()

    @app.post("/generate")
    async def generate(request: SampleRequest) -> Response:
        sample = await engine.generate(request)
        message = wire.pack({"weight_version": sample.weight_version}, sample.arrays)
        return Response(message, media_type=wire.CONTENT_TYPE)

    @app.post("/sleep")
    async def sleep() -> None:
        await engine.sleep()

    @app.post("/wake")
    async def wake() -> None:
        await engine.wake()

    @app.post("/weights/begin")
    async def begin_weights(update: Update) -> None:
        await engine.begin_weights(update)

    @app.post("/weights/bucket")
    async def load_bucket(bucket: dict[str, Any]) -> None:
        await engine.load_bucket(bucket)

    @app.post("/weights/end")
    async def end_weights(names: list[str] | None = Body(None, embed=True)) -> dict[str, Any]:  # noqa: B008
        return await engine.end_weights(names)

    return app


if __name__ == "__main__":
    main()
