"""The manifests in examples/kubernetes, as kubectl and the API server understand them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from source_copy import ROOT

from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry

FOLDER = ROOT / "examples/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
#: What is applied together. The first is what the kustomization has.
LAYOUTS = {
    "server": ["server.yaml", "engine.yaml"],
    **{path.stem.partition("-")[2]: [path.name] for path in sorted(FOLDER.glob("engine-*.yaml"))},
}
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def objects(layout: str) -> list[dict]:
    """All objects of a layout, with those that every layout may have."""
    files = [*LAYOUTS[layout], "network.yaml", "monitoring.yaml"]
    return [each for file in files for each in yaml.safe_load_all((FOLDER / file).read_text())]


def patched(manifests: list[dict]) -> list[dict]:
    """As the patches of the kustomization leave them: those of Kubernetes, and not of OpenShift."""
    for patch in KUSTOMIZATION["patches"]:
        for changed in of_kind(manifests, patch["target"]["kind"]):
            for change in json.loads(patch["patch"]):
                *way, name = change["path"].split("/")[1:]
                for step in way:
                    changed = changed[step]
                changed[name] = change["value"]
    return manifests


def of_kind(manifests: list[dict], *kinds: str) -> list[dict]:
    return [each for each in manifests if each["kind"] in kinds]


def named(manifests: list[dict], kind: str, name: str) -> dict:
    (found,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name)
    return found


def workloads(manifests: list[dict]) -> list[dict]:
    return of_kind(manifests, "DaemonSet", "Deployment", "StatefulSet")


def pods(manifests: list[dict]) -> Iterator[dict]:
    """The spec of each workload's pods."""
    for workload in workloads(manifests):
        yield workload["spec"]["template"]["spec"]


def containers(pod: dict) -> list[dict]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def volumes(workload: dict) -> dict[str, dict]:
    """The volumes of a workload's pods by name, those made from templates of claims among them."""
    claims = {each["metadata"]["name"]: each["spec"] for each in workload["spec"].get("volumeClaimTemplates", [])}
    return claims | {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}


def file_of(manifests: list[dict], workload: dict, container: dict) -> str:
    """The text of kvtier's file that a container reads."""
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == "/config")
    config_map = volumes(workload)[mount["name"]]["configMap"]["name"]
    return named(manifests, "ConfigMap", config_map)["data"]["kvtier.yaml"]


def config_of(text: str, folder: Path) -> StackConfig:
    (folder / "kvtier.yaml").write_text(text)
    return load_config(folder / "kvtier.yaml", Registry.discover())


def nbytes(quantity: str) -> int:
    """Of what Kubernetes calls a quantity, such as ``64Gi``."""
    number, unit = re.fullmatch(r"(\d+)([MGT]i)", quantity).groups()
    return int(number) * UNITS[unit]
