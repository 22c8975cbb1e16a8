"""The story of a dataset and a run in S3, against moto's server on this machine: `make moto` installs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

import recspec as rs
from recspec.base.errors import DataError, RecspecError
from recspec.base.stores import copies, parse
from recspec.base.stores.store import Store
from tests.processes import Running

pytestmark = pytest.mark.slow  # a server that is written in Python answers some 50 requests a second

INSTALLED = Path(__file__).parents[2] / ".venv" / "moto" / "bin" / "moto_server"
SERVER = os.environ.get("MOTO_SERVER") or (str(INSTALLED) if INSTALLED.exists() else None)
COLUMNS = {"user": "user", "item": "item", "timestamp": "timestamp"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server of its own."""
    if SERVER is None:
        pytest.skip("no moto_server in .venv/moto; `make moto` installs it")
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", "0"], stdout=out, stderr=out)
    while not (listening := re.search(r"Running on (http://127\.0\.0\.1:\d+)\n", log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    yield listening[1]
    process.kill()
    process.wait()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fs.FileSystem:
    """An empty bucket `shop`, and this process's credentials for it."""
    for name, value in surroundings(endpoint, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    found = fs.S3FileSystem(
        endpoint_override=endpoint, region="us-east-1", allow_bucket_creation=True, allow_bucket_deletion=True
    )
    found.create_dir("shop")
    yield found
    found.delete_dir_contents("shop")


def surroundings(endpoint: str, cache: Path) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "an-id",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RECSPEC_CACHE": str(cache),
    }


def put_events(bucket: fs.FileSystem, name: str = "shop/raw/events.csv") -> None:
    rows = [
        f"u{user},i{(user * 7 + step * step) % 40},{1_600_000_000 + user * 1000 + step * 60}\n"
        for user in range(120)
        for step in range(8)
    ]
    with bucket.open_output_stream(name) as out:
        out.write(("user,item,timestamp\n" + "".join(rows)).encode())


def names(bucket: fs.FileSystem, folder: str) -> set[str]:
    found = bucket.get_file_info(fs.FileSelector(f"shop/{folder}", recursive=True, allow_not_found=True))
    return {each.path.removeprefix(f"shop/{folder}/") for each in found if each.type == fs.FileType.File}


def test_prepare_train_evaluate_report_and_serve(bucket: fs.FileSystem) -> None:
    put_events(bucket)
    data = rs.prepare("s3://shop/raw", "s3://shop/data", **COLUMNS, progress=False)
    assert {"feature_spec.yaml", "prepare.json", "train/part-00000.parquet"} <= names(bucket, "data")
    assert not [each for each in names(bucket, "data") if "recspec" in each]
    again = rs.prepare("s3://shop/raw", "s3://shop/data", **COLUMNS, progress=False)
    assert "already prepared: s3://shop/data" in copies.shown(again.message)
    with pytest.raises(DataError, match=r"s3://shop/data: was prepared differently; pass --force to replace it"):
        rs.prepare("s3://shop/raw", "s3://shop/data", **COLUMNS, split="time", progress=False)
    assert rs.check("s3://shop/data/feature_spec.yaml")["train"] == data.check()["train"]

    with bucket.open_output_stream("shop/recipe.yaml") as out:
        out.write(b"model: popularity\n")
    model = rs.train(
        "popularity", "s3://shop/data", "s3://shop/runs/first", recipe="s3://shop/recipe.yaml", progress=False
    )
    assert {"run.json", "log.jsonl", "bundle/manifest.json"} <= names(bucket, "runs/first")
    with bucket.open_input_file("shop/runs/first/run.json") as file:
        record = file.read().decode()
    assert json.loads(record)["data"]["path"] == "s3://shop/data"
    assert "a-secret" not in record
    with pytest.raises(RecspecError, match=r"s3://shop/runs/first: holds a run already"):
        rs.train("popularity", "s3://shop/data", "s3://shop/runs/first", progress=False)

    evaluated = rs.evaluate("s3://shop/runs/first", "s3://shop/data", progress=False)
    local = rs.evaluate(os.fspath(model), data, progress=False)
    assert evaluated.to_dict()["metrics"] == local.to_dict()["metrics"]
    rs.report("s3://shop/runs/first")
    assert "report.html" in names(bucket, "runs/first")
    assert [each for each in names(bucket, "runs/first") if each.startswith("evaluations/")]
    assert [Path(each).name for each in rs.runs("s3://shop/runs").paths] == ["first"]
    rs.recommend("s3://shop/runs/first", ["u1"], k=3, out="s3://shop/answers/top.parquet")
    assert names(bucket, "answers") == {"top.parquet"}
    rs.transcode("s3://shop/data", "s3://shop/csv", to="csv")
    assert "feature_spec.yaml" in names(bucket, "csv")

    pytest.importorskip("uvicorn")
    served = rs.serve(["shop=s3://shop/runs/first"], http_port=0, grpc=False, watch=0.2)
    try:
        before = answer(served.url)
        rs.train("item_knn", "s3://shop/data", "s3://shop/runs/second", progress=False)
        for name in names(bucket, "runs/first/bundle"):
            bucket.delete_file(f"shop/runs/first/bundle/{name}")
        for name in sorted(names(bucket, "runs/second/bundle"), key=lambda each: "manifest" in each):
            bucket.copy_file(f"shop/runs/second/bundle/{name}", f"shop/runs/first/bundle/{name}")
        while answer(served.url) == before:
            time.sleep(0.2)
    finally:
        served.stop()


def answer(url: str) -> Any:
    body = json.dumps({"user": "u1", "k": 5}).encode()
    asked = urllib.request.Request(f"{url}/recommend", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as got:
        return json.load(got)


TRAIN = """
import sys
from recspec import cli
sys.argv = ["recspec", "train", "neumf", "s3://shop/data", "s3://shop/run", "--set", "epochs=40",
            "--set", "train.checkpoint_minutes=0", "--set", "train.patience=1000", *sys.argv[1:]]
cli.main()
"""


def test_a_run_whose_machine_died_goes_on_elsewhere(bucket: fs.FileSystem, endpoint: str, tmp_path: Path) -> None:
    put_events(bucket)
    rs.prepare("s3://shop/raw/events.csv", "s3://shop/data", **COLUMNS, progress=False)
    first = Running(TRAIN, **surroundings(endpoint, tmp_path / "first"))
    while not ("log.jsonl" in (held := names(bucket, "run")) and any("checkpoints/step-" in each for each in held)):
        time.sleep(0.1)
    os.kill(first.pid, 9)
    first.kill()
    assert "bundle/manifest.json" not in names(bucket, "run")
    with pytest.raises(DataError, match=r"s3://shop/run: its writer has not finished"):
        rs.open("s3://shop/run").predictor  # noqa: B018
    shutil.rmtree(tmp_path / "first")
    second = Running(TRAIN, "--resume", **surroundings(endpoint, tmp_path / "second")).ended()
    assert second.returncode == 0, second.stderr
    assert {"bundle/manifest.json", "run.json"} <= names(bucket, "run")
    with bucket.open_input_file("shop/run/log.jsonl") as file:
        starts = [json.loads(line) for line in file.read().decode().splitlines() if '"event": "start"' in line]
    assert [bool(each["resumed_at_step"]) for each in starts] == [False, True]
    assert rs.open("s3://shop/run").name == "neumf"


def test_a_file_in_several_parts_comes_back_as_it_was(bucket: fs.FileSystem, tmp_path: Path) -> None:
    assert bucket is not None
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(1 << 20) * 23)
    Store(parse("s3://shop/big.bin", "x")).upload(big)
    assert copies.fetched("s3://shop/big.bin").read_bytes() == big.read_bytes()


def test_hostile_keys_of_a_real_store_are_refused(bucket: fs.FileSystem, endpoint: str) -> None:
    bucket.create_dir("hostile")  # stays: pyarrow can't remove such keys either
    for key in ("evil/a/../../../x", "evil//abs", "evil/back%5Cslash", "evil/control%01"):
        request = urllib.request.Request(f"{endpoint}/hostile/{key}", data=b"evil", method="PUT")
        urllib.request.urlopen(request).close()
    with pytest.raises(DataError, match=r"s3://hostile/evil: can't be copied; rename or remove these objects") as told:
        copies.fetched("s3://hostile/evil")
    assert len(told.value.problems) == 4
    with pytest.raises(DataError, match=r"DATA: s3://shop/nothing holds nothing"):
        copies.fetched("s3://shop/nothing", "DATA")
    with pytest.raises(DataError, match=r"s3://no-such-bucket holds nothing; check the name"):
        copies.fetched("s3://no-such-bucket")
