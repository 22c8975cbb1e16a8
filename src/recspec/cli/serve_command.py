"""The command that serves models."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from recspec.cli.console import Device, Json, Verify, err, print_json
from recspec.cli.process import end_by_force


def serve(
    models: Annotated[
        list[str],
        Argument(
            metavar="[NAME=]RUN...",
            help="Runs, bundles, exports, or folders with versions 1, 2, ... of one.",
        ),
    ],
    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 admits other machines and requires a token.")
    ] = "127.0.0.1",
    http_port: Annotated[int, Option(min=0, max=65_535, help="HTTP port; 0 picks a free one.")] = 8000,
    grpc_port: Annotated[
        int | None,
        Option(
            min=0,
            max=65_535,
            help="gRPC port; 0 picks a free one; by default 8001, or free if --http-port is 0.",
        ),
    ] = None,
    grpc: Annotated[
        bool, Option("--grpc/--no-grpc", help="Answer over gRPC too, if tritonclient is installed.")
    ] = True,
    token_file: Annotated[
        Path | None,
        Option(help="File with the bearer token; by default the variable RECSPEC_TOKEN."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        Option(help="Further host name of the server; repeatable."),
    ] = None,
    control: Annotated[bool, Option("--control", help="Let clients load and unload models; requires a token.")] = False,
    insecure: Annotated[bool, Option("--insecure", help="Accept other machines without a token.")] = False,
    tls_cert: Annotated[Path | None, Option(help="PEM certificate with its chain; turns on TLS.")] = None,
    tls_key: Annotated[Path | None, Option(help="PEM private key, without a password.")] = None,
    max_batch: Annotated[int, Option(min=1, help="Maximum rows computed together.")] = 4096,
    max_delay_ms: Annotated[
        float, Option(min=0, help="Milliseconds that an idle model waits for more requests.")
    ] = 0.0,
    queue: Annotated[int, Option(min=1, help="Maximum waiting requests of a model; others get 503.")] = 512,
    max_rows: Annotated[int, Option(min=1, help="Maximum rows per request; larger ones get 413.")] = 65_536,
    max_body_mb: Annotated[float, Option(help="Maximum MiB per request; larger ones get 413.")] = 32,
    max_held_mb: Annotated[float, Option(help="Maximum MiB of requests in progress; others get 503.")] = 512,
    max_requests: Annotated[
        int, Option(min=1, help="Maximum requests in progress per protocol; others get 503.")
    ] = 1024,
    timeout: Annotated[float, Option(help="Maximum seconds per request; slower ones get 504.")] = 30.0,
    threads: Annotated[
        int | None,
        Option(
            min=1,
            help="Threads per worker; by default torch's number, or a share of the cores.",
        ),
    ] = None,
    workers: Annotated[int, Option(min=1, max=256, help="Processes that answer, with shared models and ports.")] = 1,
    watch: Annotated[float, Option(min=0, help="Seconds between checks for new models; 0 disables them.")] = 5.0,
    json_output: Json = False,
    device: Device = "cpu",
    verify: Verify = True,
) -> None:
    """Serve models over HTTP and gRPC, with a page to try them."""
    from recspec import api

    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=line)
    logging.getLogger("recspec").setLevel(logging.INFO)  # which version answers

    def ready(serving: api.Serving) -> None:
        if json_output:
            print_json({"http": serving.url, "grpc": serving.grpc, "models": list(serving.models)})
            sys.stdout.flush()
        grpc_too = f", gRPC at {serving.grpc}" if serving.grpc else ""
        err.print(f"{', '.join(serving.models)} at {serving.url} (a page to try it; /docs: routes){grpc_too}")

    api.serve(
        models,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        grpc=grpc,
        token_file=token_file,
        allowed_host=allowed_host,
        control=control,
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_batch=max_batch,
        max_delay_ms=max_delay_ms,
        queue=queue,
        max_rows=max_rows,
        max_body_mb=max_body_mb,
        max_held_mb=max_held_mb,
        max_requests=max_requests,
        timeout=timeout,
        threads=threads,
        workers=workers,
        watch=watch,
        device=device,
        verify=verify,
        block=True,
        ready=ready,
        force=end_by_force,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Threads of gRPC and torch sometimes abort an interpreter that ends the usual way.
    os._exit(0)
