"""The manifests: valid, shut in, and meant for each other."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.kit import DEPLOY, MANIFESTS, docker, documents, image_of, pods
from fcil_protocol.errors import KeyFileError
from fcil_protocol.storage.atomic_files import read_private
from fcil_server.federation.config import load

KUBERNETES = DEPLOY / "kubernetes"
FOREIGN = {"ServiceMonitor"}  # the Prometheus operator's; Kubernetes has no schema of it
OVERLAYS = ("server", "client", "node-client", "example")
KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")


def name(path) -> str:
    return f"{path.parent.name}/{path.name}"


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_a_manifest_is_what_kubernetes_takes(path):
    found = documents(path)
    assert found
    for document in found:
        if document["kind"] not in FOREIGN:
            validate(document)


def test_a_field_that_kubernetes_does_not_know_is_found():
    (document,) = documents(KUBERNETES / "server" / "service.yaml")
    document["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(document)


@pytest.mark.parametrize(("path", "pod"), [(p, pod) for p, _, pod in pods()], ids=str)
def test_a_pod_has_only_what_it_needs(path, pod):
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    inside = spec["securityContext"]
    user = dict(docker(image_of(container["image"])))["USER"]
    assert f"{inside['runAsUser']}:{inside['runAsGroup']}" == user
    assert inside["runAsNonRoot"] is True
    assert inside["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    places = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert {"/var/lib/fcil", "/tmp"} <= set(places)
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert "emptyDir" in volumes[places["/tmp"]]
    assert "env" not in container or [e["name"] for e in container["env"]] == ["NODE_NAME"]


@pytest.mark.parametrize(
    ("path", "pod"), [(p, pod) for p, w, pod in pods() if w["kind"] != "DaemonSet"], ids=str
)
def test_a_volume_is_not_opened_to_the_group_at_each_start(path, pod):
    assert pod["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_since_a_key_file_that_the_group_may_read_is_refused(tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(b"{}")
    path.chmod(0o660)  # what a kubelet makes of 0600 with the policy Always
    with pytest.raises(KeyFileError, match="0660"):
        read_private(path)


def test_there_is_one_server_and_no_second_client_with_the_same_keys():
    kinds = {path.parent.name: workload for path, workload, _ in pods()}
    assert kinds["server"]["spec"]["replicas"] == 1
    assert kinds["client"]["spec"]["replicas"] == 1
    assert kinds["client"]["spec"]["strategy"] == {"type": "Recreate"}
    assert "updateStrategy" not in kinds["node-client"]["spec"]  # never two on a node: no surge


def test_selectors_choose_the_pods_that_they_are_for():
    labels = {path.parent.name: pod["metadata"]["labels"] for path, _, pod in pods()}
    assert len({tuple(sorted(each.items())) for each in labels.values()}) == len(labels) == 3
    wanted = {"metrics": labels["server"]} | labels
    seen = 0
    for path in MANIFESTS:
        for document in documents(path):
            spec = document.get("spec", {})
            for key in ("selector", "podSelector"):
                chosen = spec.get(key)
                if chosen is not None and document["kind"] not in FOREIGN:
                    assert chosen.get("matchLabels", chosen) == wanted[path.parent.name], path
                    seen += 1
    assert seen >= 9


def test_the_service_monitor_finds_the_service_of_the_figures():
    (monitor,) = documents(KUBERNETES / "metrics" / "servicemonitor.yaml")
    (service,) = documents(KUBERNETES / "metrics" / "service.yaml")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    assert endpoint["scheme"] == "https"


def test_ports_have_the_names_that_services_and_policies_use():
    named = {
        p["name"]: p["containerPort"]
        for _, _, pod in pods()
        for p in pod["spec"]["containers"][0].get("ports", [])
    }
    config = load(KUBERNETES / "server" / "federation.toml")
    assert config.federation.listen == f"0.0.0.0:{named['fcil']}"
    (service,) = documents(KUBERNETES / "server" / "service.yaml")
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (named["fcil"], "fcil")
    assert config.federation.advertise == [f"{service['metadata']['name']}:{port['port']}"]
    (policy,) = documents(KUBERNETES / "server" / "networkpolicy.yaml")
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "fcil"}]
    (policy,) = documents(KUBERNETES / "client" / "networkpolicy.yaml")
    assert {"protocol": "TCP", "port": port["port"]} in policy["spec"]["egress"][1]["ports"]


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*/kustomization.yaml")), ids=name)
def test_a_kustomization_names_files_that_there_are(path):
    (document,) = documents(path)
    named = [*document.get("resources", ())]
    for generator in document.get("configMapGenerator", ()):
        named += generator["files"]
    assert named or document["kind"] == "Component"
    assert [n for n in named if not (path.parent / n).exists()] == []
    beside = {p.name for p in path.parent.iterdir()} - {"kustomization.yaml"}
    assert beside - {n for n in named if not n.startswith("..")} == set()


def test_the_configuration_is_toml_with_known_keys():
    text = (KUBERNETES / "server" / "federation.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)


def build(folder) -> list[dict[str, Any]]:
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_it_and_the_result_is_valid(overlay):
    for document in build(KUBERNETES / overlay):
        validate(document)


@needs_kubectl
def test_figures_and_a_gpu_are_added_to_the_server(tmp_path):
    shutil.copytree(KUBERNETES, tmp_path / "k")
    text = "resources: [../example]\ncomponents: [../metrics, ../gpu]\n"
    (tmp_path / "k" / "all").mkdir()
    (tmp_path / "k" / "all" / "kustomization.yaml").write_text(text, encoding="utf-8")
    built = build(tmp_path / "k" / "all")
    for document in built:
        if document["kind"] not in FOREIGN:
            validate(document)
    (server,) = [d for d in built if d["kind"] == "StatefulSet"]
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "fcil-server:cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    args = container["args"]
    assert args[args.index("--metrics") + 1] == "0.0.0.0:9464"
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert args[args.index("--metrics-cert") + 1] == f"{mounts['metrics']}/tls.crt"
    assert args[args.index("--metrics-key") + 1] == f"{mounts['metrics']}/tls.key"
    (map_name,) = [d["metadata"]["name"] for d in built if d["kind"] == "ConfigMap"]
    volumes = {v["name"]: v for v in server["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == map_name
