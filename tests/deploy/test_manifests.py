"""Manifests of other projects' kinds, held against the schemas that these projects publish. No cluster has run them."""

import json
import pathlib
import re

from absl import flags
import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.ray.arguments import SluiceArguments
from server.flags import declared_flags
from tests.test_deploy import FAREWELLS_S, values
from tools.repository.reduce_crds import POD_SPEC

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CRDS = {
  crd["kind"]: crd
  for crd in (json.loads(file.read_text()) for file in (ROOT / "tests" / "deploy" / "crds").glob("*.json"))
}
FILES = ("ray/rayservice.yaml", "hosts/leaderworkerset.yaml", "gateway/inferencepool.yaml")
DOCUMENTS = [document for file in FILES for document in yaml.safe_load_all((KUBERNETES / file).read_text())]


def close_objects(schema):
  """The schema, with unknown fields refused as `kubectl --validate=strict` does it."""
  if isinstance(schema, list):
    return [close_objects(item) for item in schema]
  if not isinstance(schema, dict):
    return schema
  closed = {key: close_objects(value) for key, value in schema.items()}
  if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
    closed.setdefault("additionalProperties", schema.get("x-kubernetes-preserve-unknown-fields", False))
  return closed


def validate_pod(validator, is_pod, instance, schema):
  if is_pod:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": instance}
    try:
      kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
      yield jsonschema.ValidationError(str(error))


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {POD_SPEC: validate_pod})


def check(document):
  crd = CRDS.get(document["kind"])
  if crd is None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    return
  assert document["apiVersion"] == crd["apiVersion"]
  Validator(close_objects(crd["schema"])).validate(document)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_a_manifest_fits_its_schema(document):
  check(document)
  spoilt = json.loads(json.dumps(document))
  spoilt["spec"]["noSuchField"] = 1
  with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
    check(spoilt)


def test_pods_within_them_are_checked_too():
  spoilt = json.loads(json.dumps(DOCUMENTS[0]))
  spoilt["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "a"
  with pytest.raises(jsonschema.ValidationError):
    check(spoilt)


def by_kind(kind):
  (document,) = (document for document in DOCUMENTS if document["kind"] == kind)
  return document["spec"]


def test_the_ray_service_agrees_with_its_application():
  service = by_kind("RayService")
  config = yaml.safe_load(service["serveConfigV2"])
  arguments = SluiceArguments(**config["applications"][0]["args"])
  (workers,) = service["rayClusterConfig"]["workerGroupSpecs"]
  assert (workers["minReplicas"], workers["maxReplicas"]) == (arguments.min_replicas, arguments.max_replicas)
  pod = workers["template"]["spec"]
  assert float(pod["containers"][0]["resources"]["requests"]["cpu"]) >= arguments.num_cpus
  assert pod["terminationGracePeriodSeconds"] >= arguments.drain_timeout_s + 15
  ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
  assert ports == {"http": config["http_options"]["port"], "grpc": config["grpc_options"]["port"]}
  ours = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
  assert config["grpc_options"]["grpc_servicer_functions"] == ours["grpc_options"]["grpc_servicer_functions"]
  (locked,) = re.findall(r"^ray==([\d.]+)", (ROOT / "requirements-ray.lock").read_text(), re.MULTILINE)
  assert service["rayClusterConfig"]["rayVersion"] == locked


def test_hosts_run_one_command():
  template = by_kind("LeaderWorkerSet")["leaderWorkerTemplate"]
  assert template["leaderTemplate"]["spec"] == template["workerTemplate"]["spec"]
  pod = template["leaderTemplate"]["spec"]
  (container,) = pod["containers"]
  if "num_hosts" not in {flag.name for flag in declared_flags()}:
    pytest.skip("this server has no flags for several hosts")
  group = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}
  known = values([re.sub(r"\$\((\w+)\)", lambda name: group[name[1]], argument) for argument in container["args"]])
  assert (known["num_hosts"], known["host_id"]) == (template["size"], 0)
  assert pod["terminationGracePeriodSeconds"] >= known["drain_delay_s"] + known["drain_timeout_s"] + FAREWELLS_S
  ports = {port["name"]: port["containerPort"] for port in container["ports"]}
  coordinator = int(known["coordinator_address"].rpartition(":")[2])
  assert ports == {
    "grpc": known["port"],
    "http": known["http_port"],
    "coordinator": coordinator,
    "steps": coordinator + 1,
  }
  assert flags.FLAGS["cluster_secret_file"] is not None
  mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
  assert str(pathlib.Path(known["cluster_secret_file"]).parent) in mounts


def test_the_pool_finds_the_pods_of_the_base():
  base = {
    document["kind"]: document for document in yaml.safe_load_all((KUBERNETES / "base" / "sluice.yaml").read_text())
  }
  pod = base["Deployment"]["spec"]["template"]
  pool = by_kind("InferencePool")
  assert pool["selector"]["matchLabels"] == pod["metadata"]["labels"]
  ports = {port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
  assert {port["number"] for port in pool["targetPorts"]} <= ports
  backend = by_kind("HTTPRoute")["rules"][0]["backendRefs"][0]
  assert (backend["kind"], backend["name"]) == ("InferencePool", "sluice")
