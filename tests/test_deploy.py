"""The files of deploy/: what they name exists in recspec, and what they promise of pods is written in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from scripts import locked_requirements

from recspec.cli.app import app
from recspec.serving.server import OPEN
from recspec.serving.server_metrics import ServerMetrics
from recspec.serving.settings import ServeSettings

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = {
    f"{file.parent.name}/{file.name}": [each for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) if each]
    for file in sorted(DEPLOY.glob("kubernetes/*/*.yaml"))
}
DOCUMENTS = [each for documents in MANIFESTS.values() for each in documents]
PINNED = re.compile(r"[a-z0-9./-]+:v?[0-9]+\.[0-9]+\.[0-9]+[a-z0-9.-]*")


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The specification of each pod, under the name of its owner."""
    for each in DOCUMENTS:
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for _, pod in pods():
        yield from pod.get("initContainers", [])
        yield from pod["containers"]


def check_command(words: list[str]) -> None:
    """Parse a command as the command line does, and run nothing."""
    command = typer.main.get_command(app)
    with command.make_context("recspec", words[:1], resilient_parsing=True) as context:
        named = command.get_command(context, words[0])  # type: ignore[attr-defined]
        assert named is not None, words[0]
        named.make_context(words[0], words[1:], parent=context).close()


def after_recspec(text: str) -> list[str]:
    """The words of a shell command after `-m recspec`; what the shell puts in stands for one word, or none."""
    plain = re.sub(r"\$\(\[.*?\)\s*$|\"\$\{RESUME\[@\]\}\".*", "--resume", text.strip(), flags=re.DOTALL)
    words = shlex.split(plain.replace("\\\n", " "), comments=True)
    return words[words.index("recspec") + 1 :]


def served() -> dict[str, Any]:
    (found,) = [each for each in containers() if each["name"] == "recspec"]
    return found


# --- commands --------------------------------------------------------------------------------------------------------


def test_every_command_is_one_that_recspec_has_with_options_that_it_takes() -> None:
    check_command(served()["args"])
    job = next(each for each in containers() if each["name"] == "train")
    script = (DEPLOY / "slurm" / "train.sbatch").read_text(encoding="utf-8")
    started = script[script.index("srun torchrun") : script.index("STEPS=")]
    for text in (job["args"][0], started):
        assert after_recspec(text)[:2] == ["train", "dlrm"]
        check_command(after_recspec(text))


def test_commands_of_the_loop_are_those_that_recspec_has() -> None:
    (updater,) = [each for each in containers() if each["name"] == "updater"]
    check_command(updater["args"])
    started = [
        line.partition("/bin/recspec ")[2]
        for file in sorted(DEPLOY.glob("systemd/*.service"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("ExecStart=")
    ]
    assert len(started) == 6
    for each in started:
        check_command(shlex.split(each))
    nightly = (DEPLOY / "systemd" / "recspec-nightly.service").read_text(encoding="utf-8")
    assert "Wants=recspec-catalogue.service" in nightly, "which fails alone"
    assert "recspec catalogue" not in nightly


def test_the_loop_patches_what_the_servers_have() -> None:
    (loop,) = MANIFESTS["loop/kustomization.yaml"]
    served_by = {(each["kind"], each["metadata"]["name"]): each for each in DOCUMENTS if "metadata" in each}
    for change in loop["patches"]:
        target = served_by[change["target"]["kind"], change["target"]["name"]]
        for step in yaml.safe_load(change["patch"]):
            at: Any = target
            for part in step["path"].removesuffix("/-").split("/")[1:]:
                at = at[int(part)] if isinstance(at, list) else at[part]
            assert isinstance(at, list) or step["op"] == "replace"
    assert loop["images"] == MANIFESTS["serve/kustomization.yaml"][0]["images"]


def test_an_option_that_recspec_does_not_take_would_be_found() -> None:
    with pytest.raises(Exception, match="--worker"):
        check_command(["serve", "model", "--worker=2"])


def test_recipes_of_the_training_jobs_exist() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.rglob("*") if file.is_file())
    recipes = set(re.findall(r"recipes/[\w.-]+\.yaml", text))
    assert recipes
    for recipe in recipes:
        assert (DEPLOY.parent / recipe).is_file(), recipe


# --- images ----------------------------------------------------------------------------------------------------------


def test_images_have_a_whole_version_and_ours_is_named_by_the_kustomization() -> None:
    (chosen,) = MANIFESTS["serve/kustomization.yaml"][0]["images"]
    assert PINNED.fullmatch(f"{chosen['newName']}:{chosen['newTag']}")
    for each in containers():
        assert each["image"] == chosen["name"] or PINNED.fullmatch(each["image"]), each["image"]
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    assert PINNED.fullmatch(base)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${BASE}"}


def test_the_image_is_built_from_files_whose_hashes_are_known(tmp_path: Path) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"pip install (.*?) (?=&&)", dockerfile)
    hashed = [each for each in installs if "--require-hashes" in each]
    (torch,) = [
        each for each in installs if "--require-hashes" not in each and not {"--dry-run", "--no-deps"} & {*each.split()}
    ]
    assert len(hashed) == 2
    assert torch.split()[-1] == "torch"
    report = {
        "install": [
            {"metadata": {"name": name}}
            for name in ("PyYAML", "typing_extensions", "torch", "recspec", "nvidia-cublas-cu12")
        ]
    }
    (tmp_path / "wanted.json").write_text(json.dumps(report))
    lock = DEPLOY.parent / "requirements.lock"
    entries = locked_requirements.entries(lock, locked_requirements.names_in(tmp_path / "wanted.json"))
    assert [each.partition("==")[0] for each in entries] == ["pyyaml", "typing-extensions"]
    assert all("--hash=sha256:" in each for each in entries)
    with pytest.raises(SystemExit, match=r"^requirements.lock: holds no 'no-such-thing'"):
        locked_requirements.main([str(lock), "--only", "no-such-thing"])


def test_the_dockerfile_copies_files_that_exist_and_that_the_context_holds() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert copied
    for name in copied:
        assert (DEPLOY.parent / name).exists(), name
        assert f"!{name}" in ignored, name


def test_the_image_runs_as_nobody_in_particular_with_extras_that_exist() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE) == ["10001:10001"]
    extras = {name for given in re.findall(r"EXTRAS=([\w,]+)", dockerfile) for name in given.split(",")}
    project = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert extras <= set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))


# --- what a server has -----------------------------------------------------------------------------------------------


def test_probes_ask_paths_that_the_server_answers_without_a_token_at_its_port() -> None:
    ports = {each["name"]: each["containerPort"] for each in served()["ports"]}
    assert ports == {"http": ServeSettings().http_port, "grpc": ServeSettings().grpc_port}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = served()[probe]["httpGet"]
        assert asked["path"] in OPEN, probe
        assert asked["port"] in ports, probe
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", dockerfile).groups()  # type: ignore[union-attr]
    assert (int(port), path in OPEN) == (ports["http"], True)


def test_the_autoscaler_reads_a_metric_that_the_server_has() -> None:
    known = {family.name for family in ServerMetrics().collect()}
    (scaler,) = [each for each in DOCUMENTS if each["kind"] == "HorizontalPodAutoscaler"]
    (name,) = [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"] if each["type"] == "Pods"]
    assert name in known
    assert f"seriesQuery: '{name}{{" in (DEPLOY / "kubernetes/serve/prometheus.yaml").read_text(encoding="utf-8")


def test_a_pod_has_longer_to_end_than_the_server() -> None:
    (pod,) = [pod for name, pod in pods() if name == "recspec"]
    pause = served()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + ServeSettings().shutdown_seconds + 5


def test_selectors_of_the_budget_and_the_spread_are_the_label_of_the_pods() -> None:
    (labels,) = MANIFESTS["serve/kustomization.yaml"][0]["labels"]
    (budget,) = [each for each in DOCUMENTS if each["kind"] == "PodDisruptionBudget"]
    (pod,) = [pod for name, pod in pods() if name == "recspec"]
    (spread,) = pod["topologySpreadConstraints"]
    assert labels["includeTemplates"]
    assert budget["spec"]["selector"]["matchLabels"] == spread["labelSelector"]["matchLabels"] == labels["pairs"]


def policies() -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in DOCUMENTS if each["kind"] == "NetworkPolicy"}


def test_every_pod_has_a_policy_that_names_who_reaches_it_and_what_it_reaches() -> None:
    assert set(policies()) == {name for name, _ in pods()}
    for name, policy in policies().items():
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}, name
        assert all(rule.get("from") for rule in policy["ingress"]), name
        assert all(rule.get("to") or rule.get("ports") for rule in policy["egress"]), name
    (labels,) = MANIFESTS["serve/kustomization.yaml"][0]["labels"]
    assert policies()["recspec"]["podSelector"]["matchLabels"] == labels["pairs"]
    ports = {each["name"] for each in served()["ports"]}
    assert {each["port"] for rule in policies()["recspec"]["ingress"] for each in rule["ports"]} == ports
    (service,) = [each for each in MANIFESTS["train/job.yaml"] if each["kind"] == "Service"]
    assert policies()["recspec-train"]["podSelector"]["matchLabels"] == service["spec"]["selector"]


def test_no_policy_admits_by_labels_of_pods_that_kustomize_would_change() -> None:
    senders = [each for rule in policies()["recspec"]["ingress"] for each in rule["from"]]
    assert {kind for each in senders for kind in each} == {"namespaceSelector"}


# --- security --------------------------------------------------------------------------------------------------------


def test_no_pod_is_root_writes_its_root_or_can_become_more() -> None:
    for name, pod in pods():
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 10001), name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
    for each in containers():
        own = each["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True), each["name"]
        assert own["capabilities"] == {"drop": ["ALL"]}, each["name"]
        assert "/tmp" in {mount["mountPath"] for mount in each["volumeMounts"]}, each["name"]
        assert each["resources"]["limits"]["memory"], each["name"]


def test_secrets_are_named_and_never_written() -> None:
    (token,) = [each for each in served()["env"] if each["name"] == "RECSPEC_TOKEN"]
    assert set(token) == {"name", "valueFrom"}
    assert not [each for each in DOCUMENTS if each["kind"] == "Secret"]


def test_the_kustomization_takes_every_manifest_that_needs_no_other_software() -> None:
    named = set(MANIFESTS["serve/kustomization.yaml"][0]["resources"])
    there = {name.partition("/")[2] for name in MANIFESTS if name.startswith("serve/")}
    assert there - named == {"kustomization.yaml", "prometheus.yaml"}
