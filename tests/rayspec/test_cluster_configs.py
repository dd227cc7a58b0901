"""The examples of configs/cluster say what this release can do."""

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray._private import ray_constants
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from rayspec.config import load_config
from rayspec.serving import service as service_module
from rayspec.serving.deployed import INGRESS
from rayspec.serving.ingress import SERVERS
from rayspec.serving.proxy import VARIABLES as PROXY
from rayspec.serving.service import ServiceArgs
from rayspec.shipped import drafter_label
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.placement import place
from sglang_ext.settings import build

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "configs" / "cluster"
NODE_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # of ray._private.ray_constants
START_S = 900  # that a replica may need


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    manifest = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest["spec"]


def test_runtime_environments_are_ones_of_ray(job: dict[str, Any]) -> None:
    for text in ((CLUSTER / "runtime_env.yaml").read_text(), job["runtimeEnvYAML"]):
        entries = yaml.safe_load(text)
        found = RuntimeEnv(**entries)
        assert {"RAYSPEC_HOME", "MLFLOW_TRACKING_URI"} <= set(found.env_vars())


def test_the_job_is_a_sweep_of_this_release(job: dict[str, Any]) -> None:
    _, script, *arguments = shlex.split(job["entrypoint"].replace("/opt/src", str(ROOT)))
    assert Path(script).is_file()
    overrides = [a for a in arguments if "=" in a]
    assert arguments[: len(arguments) - len(overrides)] == ["--config", f"{ROOT}/configs/sweep/heads.yaml"]
    config = load_config(SweepConfig, arguments[1], overrides)
    assert config.concurrency == [1, 4, 16]
    of = {head.drafter for entry in config.heads for head in entry.asked if head.drafter is not None}
    assert of <= {drafter_label(d) for d in config.drafters}, "heads are made of drafters that the job names"
    assert config.engine.num_threads is None
    assert config.engine.extra == {}, "CUDA graphs are on: without them every head is bound by its launches"
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    gpus = float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert place(config, [0.0, gpus]).memory_share is not None, "both engines fit onto the GPU of a node"


def test_pods_and_pins_agree(job: dict[str, Any]) -> None:
    cluster = job["rayClusterSpec"]
    assert re.search(rf"^ray=={re.escape(cluster['rayVersion'])}$", (ROOT / "constraints.txt").read_text(), re.M)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= volumes
        kubernetes_takes(group["template"])
        misnamed = copy.deepcopy(group["template"])
        misnamed["spec"]["containers"][0]["volumesMounts"] = []
        with pytest.raises(kubernetes_validate.ValidationError, match="'volumesMounts' was unexpected"):
            kubernetes_takes(misnamed)


def kubernetes_takes(template: dict[str, Any]) -> None:
    """By Kubernetes' own schema: each field is one of a pod's, and of its type."""
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_nobody_else_uses_the_cluster_and_no_login_is_shown(job: dict[str, Any]) -> None:
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert "@" not in job["runtimeEnvYAML"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["envFrom"] == [{"secretRef": {"name": "mlflow-login", "optional": True}}]


def test_the_image_holds_what_is_installed() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (CLUSTER / "Dockerfile").read_text(), re.M)
    assert all((ROOT / name).exists() for names in copied for name in names.split())


# of ray.io/v1's RayServiceSpec and RayClusterSpec (KubeRay 1.6)
OF_A_SERVICE = {
    "serveConfigV2",
    "rayClusterConfig",
    "upgradeStrategy",
    "serveService",
    "rayClusterDeletionDelaySeconds",
}
OF_A_CLUSTER = {"authOptions", "rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    manifest = yaml.safe_load((CLUSTER / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    return manifest["spec"]


def test_the_service_is_one_of_ray_serve(service: dict[str, Any]) -> None:
    """By Ray's own schema, with our functions, their arguments and the names that the ingress knows."""
    found = ServeDeploySchema.model_validate(yaml.safe_load(service["serveConfigV2"]))
    servers, ingress = found.applications
    assert (servers.name, servers.route_prefix) == (SERVERS, None)
    assert (ingress.name, ingress.route_prefix, ingress.args) == (INGRESS, "/", {})
    assert [a.import_path for a in found.applications] == [
        f"{service_module.__name__}:{f}" for f in ("servers", "ingress")
    ]
    given = build(ServiceArgs, servers.args)
    assert given.scale.maximum == 4
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == f"{given.gpus:g}"
    assert service["rayClusterDeletionDelaySeconds"] > given.drain_s
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert group["maxReplicas"] >= 2 * given.max_replicas
    assert service_module.ingress({}).__class__.__name__ == "Application"
    with pytest.raises(ValueError, match="unknown key 'x'; known: max_body_mib, log_format, drain_s, router"):
        service_module.ingress({"x": 1})
    with pytest.raises(ValueError, match="unknown key 'nobody'"):
        service_module.servers({"source": "x", "nobody": 1})


def test_a_worker_that_ends_answers_what_runs(service: dict[str, Any]) -> None:
    """Ray stops a replica as late as leaves it its drain time before the node's deadline, which another one has to
    start in; Kubernetes kills the pod after its grace."""
    assert hasattr(ray_constants, NODE_DRAIN)
    servers, _ = yaml.safe_load(service["serveConfigV2"])["applications"]
    drain_s = build(ServiceArgs, servers["args"]).drain_s
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        env = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
        node_s = float(env[NODE_DRAIN])
        assert pod["terminationGracePeriodSeconds"] > node_s >= drain_s + START_S


def test_no_request_goes_to_a_pod_without_a_proxy(service: dict[str, Any]) -> None:
    """KubeRay's service takes each pod that is ready, and its own probe asks for the proxy."""
    assert yaml.safe_load(service["serveConfigV2"])["proxy_location"] == "HeadOnly"
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        assert "readinessProbe" not in group["template"]["spec"]["containers"][0]


def test_the_ingress_of_the_service_has_a_limit_and_a_log_of_its_own() -> None:
    built = service_module.ingress({"max_body_mib": 5, "log_format": "json"})._bound_deployment
    assert built.init_args == (5, False)
    assert service_module.ingress({"router": "prefix"})._bound_deployment.init_args[1], "it reads prompts for it"
    drained = service_module.ingress({"drain_s": 3600})._bound_deployment
    assert drained._deployment_config.graceful_shutdown_timeout_s == 3600
    assert built._deployment_config.logging_config["encoding"] == "JSON"
    for args, message in (
        ({"max_body_mib": -1}, r"max_body_mib must be in 0\.\.1048576 \(0: any size\), got -1"),
        ({"log_format": "xml"}, "log_format must be one of text, json, got 'xml'"),
        ({"router": "prefx"}, "^router must be one of balanced, prefix, got 'prefx'"),
        ({"drain_s": 0}, "^drain_s must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            service_module.ingress(args)


def test_the_services_cluster(service: dict[str, Any]) -> None:
    assert set(service) <= OF_A_SERVICE
    cluster = service["rayClusterConfig"]
    assert set(cluster) <= OF_A_CLUSTER
    assert cluster["authOptions"] == {"mode": "token"}
    test_pods_and_pins_agree({"rayClusterSpec": cluster})
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert {p["name"]: p["containerPort"] for p in head["ports"]}["serve"] == 8000
    assert PROXY.items() <= {e["name"]: e["value"] for e in head["env"]}.items()
