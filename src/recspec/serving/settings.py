"""Settings of a server: its addresses and connections, how it opens models, and its limits."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from recspec.base import config


class ServeSettings(config.Settings):
    """Settings of a server's addresses, connections and end."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen at; 0.0.0.0 admits other machines")
    http_port: int = Field(8000, ge=0, le=65_535, description="HTTP port; 0 picks a free one")
    grpc_port: int | None = Field(8001, ge=0, le=65_535, description="gRPC port; 0 picks a free one")
    allowed_host: tuple[str, ...] = Field((), description="further host names of the server")
    insecure: bool = Field(False, description="admit other machines without a token")
    tls_cert: Path | None = Field(None, description="certificate in PEM, with its chain; HTTPS and gRPC over TLS")
    tls_key: Path | None = Field(None, description="the certificate's private key in PEM, without a password")
    workers: int = Field(1, ge=1, le=256, description="processes that answer; they share one copy of the weights")
    shutdown_seconds: float = Field(30.0, ge=0, description="time for requests under way after a request to stop")
    keep_alive_seconds: int = Field(75, ge=1, description="time that an idle connection stays open")
    write_seconds: float = Field(30.0, gt=0, description="longest pause of a client while it reads its answer")
    max_connections: int = Field(512, ge=1, description="open connections of each protocol; more are closed")


class RepositorySettings(config.Settings):
    """Settings of opening and reloading models."""

    device: str = Field("cpu", description="device that computes: auto, cpu or cuda")
    threads: int | None = Field(None, ge=1, description="threads that compute a batch; by default torch's number")
    verify: bool = Field(True, description="compare a model's files with its manifest before opening it")
    control: bool = Field(False, description="let clients with the token load and unload models")
    watch: float = Field(5.0, ge=0, description="seconds between checks of a model's folder for new content; 0: never")
    journal: str | None = Field(
        None, description="journal that stores events and answers: sqlite:///FILE or postgresql+psycopg://..."
    )
    drift: float = Field(900.0, ge=0, description="seconds between measurements of drift against the journal; 0: never")


class Limits(config.Settings):
    """Limits of a server; a request beyond one is refused with the status given."""

    max_batch: int = Field(4096, ge=1, description="rows computed together")
    max_delay_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="milliseconds an idle model waits for more requests to batch; 0: it never waits",
    )
    queue: int = Field(512, ge=1, description="waiting requests of a model; more are refused with 503")
    max_rows: int = Field(65_536, ge=1, description="rows of a request; more are refused with 413")
    max_events: int = Field(1000, ge=1, description="events of a request; more are refused with 413")
    journal_queue: int = Field(
        20_000, ge=1, description="events and answers that wait for the journal; more are refused with 503"
    )
    max_body_mb: float = Field(32, ge=1 / 1024, description="MiB of a request's body; a larger one is refused with 413")
    max_requests: int = Field(1024, ge=1, description="requests answered at once by each protocol; more get 503")
    max_held_mb: float = Field(512, ge=1 / 1024, description="MiB of all requests being answered; more get 503")
    timeout: float = Field(
        30.0, gt=0, le=3600, description="time from a request's head to its answer; later ones get 504"
    )
    retry_seconds: int = Field(1, ge=0, description="value of Retry-After if a queue is full")

    @property
    def max_body_bytes(self) -> int:
        """Bytes of a request's body."""
        return int(self.max_body_mb * 2**20)

    @property
    def max_held_bytes(self) -> int:
        """Bytes of all requests being answered."""
        return int(self.max_held_mb * 2**20)
