"""What the manifests in examples/kubernetes name is there, fits, and is allowed in a restricted namespace."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tomllib

import pytest
import yaml
from kustomized import (
    FOLDER,
    KUSTOMIZATION,
    LAYOUTS,
    config_of,
    containers,
    file_of,
    named,
    nbytes,
    objects,
    of_kind,
    patched,
    pods,
    volumes,
    workloads,
)
from patience import HANG
from servers.kvtier import KVTIER
from source_copy import ROOT

from kvtier_core.cli import parser
from kvtier_core.config.model import ArenaTierConfig
from kvtier_fleet.settings import load

PAGE = (ROOT / "docs/kubernetes.md").read_text()
#: What `restricted` of Pod Security allows, and hostPath, which only the layouts that share a node need.
ALLOWED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim"}
ON_THE_NODE = {"server", "hostpath"}
#: What a process needs besides its arenas.
OWN_MEMORY = 1 << 30

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def broken_rules(pod, *, on_the_node):
    """Those of `restricted` of Pod Security and of OpenShift's `restricted-v2` that a pod breaks.

    On a node, an init container makes folders of the node the user's: it is root, and may do only that.
    """
    context = pod["securityContext"]
    if not context.get("runAsNonRoot") or context.get("runAsUser") == 0:
        yield "runAsNonRoot"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "seccompProfile"
    if not on_the_node and {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & context.keys():
        yield "OpenShift assigns users and groups"
    if {"hostNetwork", "hostPID", "hostIPC"} & pod.keys():
        yield "a namespace of the node"
    if pod.get("automountServiceAccountToken") is not False:
        yield "a token for the API"
    allowed = ALLOWED_VOLUMES | ({"hostPath"} if on_the_node else set())
    if any(volume.keys() - {"name"} - allowed for volume in pod["volumes"]):
        yield "a volume"
    for container in containers(pod):
        own = container["securityContext"]
        makes_owner = on_the_node and container["command"][0] == "chown"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield "allowPrivilegeEscalation"
        if own.get("readOnlyRootFilesystem") is not True:
            yield "readOnlyRootFilesystem"
        if own.get("capabilities") != {"drop": ["ALL"], **({"add": ["CHOWN"]} if makes_owner else {})}:
            yield "capabilities"
        if {"runAsNonRoot", "runAsUser"} & own.keys() and not makes_owner:
            yield "runAsNonRoot"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield "a port of the node"
        if container in pod["containers"] and "memory" not in container.get("resources", {}).get("limits", {}):
            yield "no limit of memory"


@each_layout
def test_pods_keep_the_rules_of_restricted_namespaces(layout):
    for pod in pods(objects(layout)):
        assert list(broken_rules(pod, on_the_node=layout in ON_THE_NODE)) == []


#: What breaks each rule, in the first container of a pod or in the pod.
BREAKS = {
    "runAsNonRoot": ["pod['securityContext'].pop('runAsNonRoot')", "own['runAsUser'] = 0"],
    "seccompProfile": ["pod['securityContext'].pop('seccompProfile')"],
    "OpenShift assigns users and groups": [
        "pod['securityContext']['runAsUser'] = 1000",
        "pod['securityContext']['fsGroup'] = 1000",
    ],
    "a namespace of the node": ["pod['hostPID'] = True", "pod['hostNetwork'] = True"],
    "a token for the API": ["pod.pop('automountServiceAccountToken')"],
    "a volume": ["pod['volumes'].append({'name': 'node', 'hostPath': {'path': '/'}})"],
    "allowPrivilegeEscalation": ["own.pop('allowPrivilegeEscalation')", "own['privileged'] = True"],
    "readOnlyRootFilesystem": ["own.pop('readOnlyRootFilesystem')"],
    "capabilities": ["own.pop('capabilities')", "own['capabilities']['add'] = ['SYS_NICE']"],
    "a port of the node": ["first['ports'][0]['hostPort'] = 8000"],
    "no limit of memory": ["first['resources']['limits'].pop('memory')"],
}


@pytest.mark.parametrize(("rule", "change"), [(rule, each) for rule, changes in BREAKS.items() for each in changes])
def test_a_pod_without_a_setting_breaks_its_rule(rule, change):
    for pod in pods(objects("sidecar")):
        changed = copy.deepcopy(pod)
        first = changed["containers"][0]
        exec(change, {"pod": changed, "first": first, "own": first["securityContext"]})
        assert list(broken_rules(changed, on_the_node=False)) == [rule]


@each_layout
def test_what_a_manifest_names_is_there(layout):
    manifests = objects(layout)
    for workload in workloads(manifests):
        there = volumes(workload)
        assert workload["spec"]["selector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]
        pod = workload["spec"]["template"]["spec"]
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == there.keys()
        for volume in there.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert f"`{claim['claimName']}`" in PAGE
        for container in containers(pod):
            assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
            for probe in (container[name] for name in container if name.endswith("Probe")):
                assert "exec" in probe or probe["httpGet"]["port"] in ports(container)
            for variable in container.get("env", []):
                if "valueFrom" in variable:
                    secret = variable["valueFrom"]["secretKeyRef"]
                    assert secret["key"] in secrets_of_the_page(secret["name"])


def ports(container):
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def secrets_of_the_page(name):
    (command,) = re.findall(rf"^kubectl .*create secret generic {name} .*$", PAGE.replace("\\\n", ""), re.MULTILINE)
    return re.findall(r"--from-literal=([\w-]+)=", command)


def selected(manifests, labels):
    """The ports of the pods with these labels, by name."""
    templates = [each["spec"]["template"] for each in workloads(manifests)]
    found = [each["spec"] for each in templates if labels.items() <= each["metadata"]["labels"].items()]
    return {name: port for pod in found for container in pod["containers"] for name, port in ports(container).items()}


@each_layout
def test_services_budgets_and_monitors_select_pods_with_these_ports(layout):
    manifests = objects(layout)
    apps = {each["spec"]["selector"]["matchLabels"]["app"] for each in workloads(manifests)}
    services = of_kind(manifests, "Service")
    for service in services:
        offered = selected(manifests, service["spec"]["selector"])
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]}.items() <= offered.items()
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert selected(manifests, budget["spec"]["selector"]["matchLabels"])
    for app in apps:
        monitor = named(manifests, "ServiceMonitor", app)
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (each for each in services if labels <= each["metadata"].get("labels", {}).items())
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        if "authorization" in endpoint:
            credentials = endpoint["authorization"]["credentials"]
            assert credentials["key"] in secrets_of_the_page(credentials["name"])


@each_layout
def test_every_port_is_reached_by_those_alone_that_a_policy_names(layout):
    manifests = objects(layout)
    for workload in workloads(manifests):
        app = workload["spec"]["selector"]["matchLabels"]["app"]
        policy = named(manifests, "NetworkPolicy", app)["spec"]
        assert policy["podSelector"]["matchLabels"] == {"app": app} and policy["policyTypes"] == ["Ingress"]
        opened = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
        assert selected(manifests, {"app": app}).keys() <= opened.keys()
        assert opened["peers"] == [{"podSelector": {"matchLabels": {"app": app}}}]
        for asks in opened.get("operators", []):
            fleet = {"podSelector": {"matchLabels": {"app": "kvtier-fleet"}}}
            assert asks == fleet or asks.keys() == {"namespaceSelector", "podSelector"}


@each_layout
def test_peers_are_those_of_a_headless_service(layout, tmp_path):
    manifests = objects(layout)
    for workload, _, text in files(manifests):
        for tier in config_of(text, tmp_path).tiers:
            if tier.config.type == "peers":
                name, port = tier.config.peers[0].split(":")
                service = named(manifests, "Service", name)["spec"]
                assert service["clusterIP"] == "None"
                assert {"name": "peers", "port": int(port)} in service["ports"]
                assert service["selector"] == workload["spec"]["selector"]["matchLabels"]
                assert tier.config.address == f"0.0.0.0:{port}"


def files(manifests):
    """Each workload with each of its containers, and the text of kvtier's file that this one reads."""
    for workload in workloads(manifests):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            yield workload, container, file_of(manifests, workload, container)


@each_layout
def test_files_are_accepted_and_engines_are_given_theirs(layout, tmp_path):
    for _, container, text in files(objects(layout)):
        (tmp_path / "kvtier.yaml").write_text(text)
        command = KVTIER, "check", "--elsewhere", tmp_path / "kvtier.yaml"
        checked = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        assert checked.returncode == 0, checked.stderr
        if container["command"][0] == "vllm":
            option = container["command"].index("--kv-transfer-config")
            connector = json.loads(container["command"][option + 1])
            assert connector["kv_connector_extra_config"] == {"kvtier.config": "/config/kvtier.yaml"}
        else:
            assert container["command"][2:4] == ["--config", "/config/kvtier.yaml"]


@each_layout
def test_capacities_fit_into_the_limits_of_memory_and_the_sizes_of_volumes(layout, tmp_path):
    for workload, container, text in files(objects(layout)):
        there = {mount["mountPath"]: volumes(workload)[mount["name"]] for mount in container["volumeMounts"]}
        in_memory = {
            path: nbytes(volume["emptyDir"]["sizeLimit"])
            for path, volume in there.items()
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        }
        arenas = 0
        for tier in config_of(text, tmp_path).tiers:
            if isinstance(tier, ArenaTierConfig):
                with_journal = tier.capacity + (tier.capacity >> 10)
                room = in_memory.pop(str(tier.keep.parent), with_journal) if tier.keep else with_journal
                assert with_journal <= room
                arenas += room
            elif tier.config.type == "disk":
                (volume,) = (volume for path, volume in there.items() if tier.config.path.is_relative_to(path))
                needed = tier.capacity + tier.config.min_free + tier.config.quarantine
                assert "hostPath" in volume or needed <= size_of(volume)
        assert arenas + sum(in_memory.values()) + OWN_MEMORY <= nbytes(container["resources"]["limits"]["memory"])
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def size_of(volume):
    claim = volume.get("resources", {}).get("requests", {})
    return nbytes(claim["storage"] if claim else volume["emptyDir"]["sizeLimit"])


def test_engines_differ_only_in_their_volumes_memory_and_peers():
    alike = [
        {name: each for name, each in container.items() if name not in ("env", "ports", "resources", "volumeMounts")}
        for layout in LAYOUTS
        for _, container, _ in files(objects(layout))
        if container["name"] == "vllm"
    ]
    assert alike == [alike[0]] * len(LAYOUTS)


def test_engines_run_as_the_user_of_their_server():
    """Where they are in one pod, they do anyway."""
    server, engine = pods(objects("server"))
    assert server["securityContext"]["runAsUser"] == engine["securityContext"]["runAsUser"]


def test_the_image_of_the_server_has_all_that_its_tiers_and_its_packages_need(tmp_path):
    text = (ROOT / "examples/serve/Containerfile").read_text()
    built = {ROOT / "plugins" / name for name in re.findall(r"/src/plugins/(\w+)", text)}
    (file,) = (text for _, container, text in files(objects("server")) if container["name"] == "kvtier")
    needed = {f"kvtier-{tier.config.type}" for tier in config_of(file, tmp_path).tiers} | {
        "kvtier-serve",
        "kvtier-fleet",
    }
    for folder in built:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        needed |= set(re.findall(r"kvtier-\w+", " ".join(project["dependencies"])))
    assert needed <= {folder.name.replace("_", "-") for folder in built}


def test_the_fleet_is_that_of_the_servers_and_may_ask_them(tmp_path):
    manifests = [*yaml.safe_load_all((FOLDER / "fleet.yaml").read_text()), *objects("server")]
    fleet, service = named(manifests, "Deployment", "kvtier-fleet"), named(manifests, "Service", "kvtier")
    template = fleet["spec"]["template"]
    assert list(broken_rules(template["spec"], on_the_node=False)) == []
    assert fleet["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    settings = tmp_path / "fleet.yaml"
    settings.write_text(named(manifests, "ConfigMap", "kvtier-fleet")["data"]["fleet.yaml"])
    (operators,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "operators")
    for container in template["spec"]["containers"]:
        asked = parser().parse_args(container["command"][1:])
        assert str(asked.config) == "/config/fleet.yaml"
        assert all(each.startswith("127.0.0.1:") for each in getattr(asked, "http", []))
        assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
        for variable in container["env"]:
            secret = variable["valueFrom"]["secretKeyRef"]
            assert secret["key"] in secrets_of_the_page(secret["name"])
    assert load(settings).servers == (f"kvtier:{operators}",)
    policy = named(manifests, "NetworkPolicy", "kvtier")["spec"]["ingress"]
    (may_ask,) = (rule["from"] for rule in policy if rule["ports"] == [{"port": "operators"}])
    assert {"podSelector": {"matchLabels": template["metadata"]["labels"]}} in may_ask


def test_one_pod_at_a_time_is_replaced():
    (server,) = of_kind(objects("server"), "DaemonSet")
    assert server["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    for layout in LAYOUTS:
        for engine in of_kind(objects(layout), "Deployment"):
            assert engine["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_the_kustomization_has_these_files_and_gives_claims_to_a_group():
    named_there = set(re.findall(r"[\w-]+\.yaml", (FOLDER / "kustomization.yaml").read_text()))
    assert set(KUSTOMIZATION["resources"]) == {*LAYOUTS["server"], "network.yaml"}
    assert {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"} >= named_there
    (engine,) = of_kind(patched(objects("claim")), "StatefulSet")
    assert engine["spec"]["template"]["spec"]["securityContext"]["fsGroup"] == 1000


def test_the_page_has_a_row_for_each_file():
    rows = re.findall(r"^\| `([\w-]+\.yaml)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in FOLDER.iterdir())
