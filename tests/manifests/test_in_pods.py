"""The manifests' containers run as their users, in volumes as kubelet makes them, and find what they stored before."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest
from kustomized import containers, file_of, objects, patched, volumes, workloads
from pods import OPENSHIFT, ROOT, Pod
from sizes import some

#: That of the images.
USER = 1000
SECRET = "a secret of thirty-two characters"
PATHS = ROOT / "tests", Path(__file__).parent, ROOT / "plugins/kvtier_serve/tests"
ENVIRONMENT = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
}
KUBERNETES, ON_OPENSHIFT = "Kubernetes", "OpenShift"


class Started:
    """The pod of the first workload of a layout, after its init containers."""

    def __init__(self, layout, platform):
        self.manifests = objects(layout) if platform == ON_OPENSHIFT else patched(objects(layout))
        workload = workloads(self.manifests)[0]
        spec = workload["spec"]["template"]["spec"]
        context = spec["securityContext"]
        if platform == ON_OPENSHIFT:
            group, self._user = OPENSHIFT, (OPENSHIFT, 0, (OPENSHIFT,))
        else:
            group = context.get("fsGroup", 0)
            self._user = context.get("runAsUser", USER), USER, (group,) if group else ()
        mounts = {mount["mountPath"]: mount["name"] for each in containers(spec) for mount in each["volumeMounts"]}
        there = volumes(workload)
        made = {path: made_by_kubelet(there[name], group) for path, name in mounts.items()}
        made.pop("/tmp", None)  # this project may lie in it
        self.pod = Pod(*made.pop("/config"), at="/config", others=made, read_only=True)
        for each in spec.get("initContainers", []):
            self.does("owns", *each["command"], user=(0, 0))

    def container(self, name):
        """A container of any workload of the layout, whose file is then at ``/config/NAME.yaml``; the path of that."""
        ((workload, container),) = (
            (workload, each)
            for workload in workloads(self.manifests)
            for each in workload["spec"]["template"]["spec"]["containers"]
            if each["name"] == name
        )
        text = re.sub(r"(type: cpu, +capacity: )\w+", r"\g<1>16MiB", file_of(self.manifests, workload, container))
        path = f"/config/{name}.yaml"
        self.pod.process(f"open({path!r}, 'w').write({text!r})", 0)
        return container, path

    def does(self, what, *arguments, user=None, **environment):
        """A step: a function of in_pod.py."""
        code = f"import in_pod; in_pod.{what}(*{arguments!r})"
        self.pod.process(code, *(user or self._user), **ENVIRONMENT, **environment)

    def outcomes(self):
        said = self.pod.run()
        lines = [line for each in said for line in each.splitlines() if line.startswith("{")]
        assert len(lines) == 2, "\n".join(said)
        return [json.loads(line) for line in lines]


def made_by_kubelet(volume, group):
    """Owner, group and mode."""
    if "emptyDir" in volume:
        return 0, group, 0o2777 if group else 0o777
    if "accessModes" in volume and group:
        return 0, group, 0o2775
    return 0, 0, 0o755


@pytest.mark.parametrize(
    ("layout", "platform"), some([("server", KUBERNETES), ("sidecar", KUBERNETES), ("sidecar", ON_OPENSHIFT)])
)
def test_a_server_passes_its_probes_serves_an_engine_and_finds_its_memory_again(layout, platform):
    started = Started(layout, platform)
    (server, file), (_, engine_file) = started.container("kvtier"), started.container("vllm")
    command = [file if word == "/config/kvtier.yaml" else word for word in server["command"]]
    probes = {name: probe for name, probe in server.items() if name.endswith("Probe")}
    secrets = {each["name"]: SECRET + each["name"] for each in server.get("env", [])}
    for _ in range(2):
        started.does("server", command, probes, engine_file, **secrets)
    first, second = started.outcomes()
    over_http = {"readinessProbe": 200, "metrics": 401, "metrics for readers": 200} if "--http" in command else {}
    expected = {"startupProbe": 0, "livenessProbe": 0, "doctor": 0, "ended": 0, **over_http}
    assert (first, second) == ({**expected, "found": 0}, {**expected, "found": 6})


@pytest.mark.parametrize(
    ("layout", "platform"),
    some(
        [*itertools.product(["emptydir", "claim"], [KUBERNETES, ON_OPENSHIFT]), ("hostpath", KUBERNETES)],
        ("emptydir", ON_OPENSHIFT),
    ),
)
def test_an_engine_opens_its_tiers_and_finds_its_frames_again(layout, platform):
    started = Started(layout, platform)
    _, file = started.container("vllm")
    for _ in range(2):
        started.does("engine", file, KVTIER_PEERS=SECRET)
    assert started.outcomes() == [{"check": 0, "found": 0}, {"check": 0, "found": 4}]
