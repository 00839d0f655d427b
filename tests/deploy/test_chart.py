"""The Helm chart: options of the node, values that make sense, and pods that may do little."""

import json
import shutil
import subprocess
from copy import deepcopy

import jsonschema
import pytest
import yaml

from frostline.core.config import check_hosts
from frostline.node.http.app import make_app
from frostline.node.http.requests import OwnNames
from frostline.wire.node_lists import NodeList
from support.chart import CHART, rendered, values_of
from support.deployed import OPTIONS, gibibytes, options_of, served_by

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CASES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())


def objects(case, **changes):
    """What the chart makes of a case, by kind."""
    values = {**values_of(case), **changes}
    jsonschema.validate(values, SCHEMA)
    texts = [text for name, text in rendered(values).items() if name.endswith(".yaml")]
    made = [value for text in texts for value in yaml.safe_load_all(text) if value]
    return {value["kind"]: value for value in made}


def pod(made):
    return made["StatefulSet"]["spec"]["template"]["spec"]


def container(made):
    (found,) = pod(made)["containers"]
    return found


def refused(changes):
    values = values_of("s3")
    for path, value in changes.items():
        *above, last = path.split(".")
        place = values
        for name in above:
            place = place[name]
        place[last] = value
    return not jsonschema.Draft7Validator(SCHEMA).is_valid(values)


@pytest.mark.parametrize("case", CASES)
def test_the_node_takes_the_options_and_they_say_what_the_values_say(case):
    values = values_of(case)
    served = served_by(container(objects(case))["args"])
    assert list(served["roots"]) == values["dataRoots"]
    assert served["listen"] == f"0.0.0.0:{values['port']}"
    assert served["allow_anonymous"] == values["open"]
    assert (served["tenants"] is None) == values["open"]
    assert served["device"] == values["node"]["device"]
    assert served["shared_cache"] == (values["cache"]["shared"] or None)


@pytest.mark.parametrize("case", CASES)
def test_ports_agree_from_the_command_to_the_policy(case):
    made = objects(case, port=7171)
    (port,) = container(made)["ports"]
    assert "--listen=0.0.0.0:7171" in container(made)["args"]
    assert port == {"name": "http", "containerPort": 7171}
    assert made["Service"]["spec"]["ports"] == [{"name": "http", "port": 7171, "targetPort": "http"}]
    assert made["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_for_paths_of_the_node_that_answer_without_a_token(case):
    made, tls = objects(case), values_of(case)["tls"]
    expected = "/v1/health" if values_of(case)["open"] else "/v1/openapi.json"
    if tls["clients"]:  # the cluster's own probes have no certificate
        for name, path in (("startupProbe", "health"), ("livenessProbe", "health"), ("readinessProbe", "ready")):
            *program, url, cert, key = container(made)[name]["exec"]["command"]
            assert program == ["python", "-I", "/opt/frostline/healthy.py"]
            assert url == f"https://127.0.0.1:7070/v1/{path}"
            served = served_by(container(made)["args"])
            assert (cert, key) == (served["tls_cert"], served["tls_key"])
        return
    scheme = "HTTPS" if tls["existingSecret"] else "HTTP"
    for name in ("startupProbe", "livenessProbe"):
        assert container(made)[name]["httpGet"] == {"path": expected, "port": "http", "scheme": scheme}
    assert container(made)["readinessProbe"]["httpGet"] == {"path": "/v1/ready", "port": "http", "scheme": scheme}


@pytest.mark.parametrize("case", CASES)
def test_nodes_speak_tls_by_the_files_of_their_secret_and_ask_clients_for_theirs(case):
    tls, served = values_of(case)["tls"], served_by(container(objects(case))["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container(objects(case))["volumeMounts"]}
    assert (served["tls_cert"] is not None) == bool(tls["existingSecret"]) == ("server" in mounts)
    assert (served["tls_client_ca"] is not None) == tls["clients"]
    for file in filter(None, (served["tls_cert"], served["tls_key"], served["tls_client_ca"])):
        assert file.startswith(f"{mounts['server']}/")


@pytest.mark.parametrize("case", CASES)
def test_pods_may_do_little(case):
    made = objects(case)
    assert pod(made)["securityContext"]["runAsNonRoot"]
    assert pod(made)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod(made)["automountServiceAccountToken"]
    security = container(made)["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("case", CASES)
def test_what_the_node_writes_to_is_mounted_and_what_is_mounted_is_there(case):
    made = objects(case)
    mounts = {mount["name"]: mount["mountPath"] for mount in container(made)["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in made["StatefulSet"]["spec"]["volumeClaimTemplates"]]
    assert {*claims, *(volume["name"] for volume in pod(made)["volumes"])} == mounts.keys()
    served = served_by(container(made)["args"])
    for path in filter(None, (served["cache_folder"], str(served["tenants"] or ""))):
        assert any(path.startswith(f"{mount}/") for mount in mounts.values())


@pytest.mark.parametrize("case", CASES)
def test_every_object_selects_the_pods_of_the_release(case):
    made = objects(case)
    labels = made["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    selected = [
        made["StatefulSet"]["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ]
    assert selected == [labels] * 4
    assert made["StatefulSet"]["spec"]["serviceName"] == made["Service"]["metadata"]["name"]
    assert made["Service"]["spec"]["clusterIP"] == "None"


def test_the_limit_of_memory_leaves_room_for_what_comes_on_top_of_the_nodes():
    values = values_of()
    memory, limit = gibibytes(values["node"]["memory"]), gibibytes(values["resources"]["limits"]["memory"])
    trial, check, listing, itself = max(memory / 2, min(memory, 2)), 1, 2, 1
    assert limit >= memory + trial + check + listing + itself
    assert gibibytes(values["cache"]["size"]) + gibibytes(values["cache"]["samples"]) < gibibytes(
        values["storage"]["size"]
    )


def test_the_notes_name_an_address_that_trainers_take():
    text = rendered(values_of("s3"))["NOTES.txt"]
    address = next(word for word in text.split() if word.startswith("dns"))
    assert NodeList(url=address).url == "dns+https://store.data.svc:7070"
    assert "FROSTLINE_TLS_CA" in text
    values = values_of("s3")
    values["tls"]["existingSecret"] = ""
    assert "--near dns://store.data.svc:7070" in rendered(values)["NOTES.txt"]
    assert "FROSTLINE_TOKEN" in text


def test_the_default_values_serve_nothing_and_nobody_until_they_are_set():
    errors = list(jsonschema.Draft7Validator(SCHEMA).iter_errors(values_of()))
    assert {tuple(error.path) for error in errors} == {("dataRoots",), ()}


@pytest.mark.parametrize(
    "changes",
    [
        {"dataRoots": []},
        {"dataRoots": ["photos"]},
        {"tenants.existingSecret": ""},
        {"open": True},
        {"port": 80},
        {"node.memory": "6 GB"},
        {"node.device": "tpu"},
        {"node.extraArgs": ["allow-training"]},
        {"resources.limits": {"cpu": "2"}},
        {"networkPolicy.from": []},
        {"networkPolicy.storePorts": []},
        {"environment": {"AWS_SECRET_ACCESS_KEY": "x"}},
        {"environment": {"FROSTLINE_CQL_PASSWORD": "x"}},
        {"environment": {"FROSTLINE_TOKEN": "x"}},
        {"environment": {"AZURE_STORAGE_ACCOUNT_KEY": "x"}},
        {"podDisruptionBudget.maxUnavailable": 0},
        {"replica": 3},
        {"tls": {"existingSecret": "", "clients": True}},
    ],
    ids=str,
)
def test_refuses_values_that_make_no_sense(changes):
    assert refused(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"FROSTLINE_CQL_KEY": "/etc/frostline/tls/key.pem"}},
        {"environment": {"FROSTLINE_STORE_REQUESTS_PER_S": "100", "AWS_PROFILE": "photos"}},
        {"node.extraArgs": ["--allow-training", "--max-run=300"]},
        {"node.device": "cuda:0,cuda:1"},
        {"podDisruptionBudget.maxUnavailable": "20%"},
        {"networkPolicy.from": [{"ipBlock": {"cidr": "10.0.0.0/24"}}]},
        {"tenants.existingSecret": "", "open": True},
    ],
    ids=str,
)
def test_takes_values_that_do(changes):
    assert not refused(changes)


def test_an_open_node_is_asked_by_the_names_of_its_service_and_pods():
    values = values_of("s3")
    values["open"], values["tenants"]["existingSecret"] = True, ""
    made = yaml.safe_load(rendered(values)["statefulset.yaml"])
    (container,) = made["spec"]["template"]["spec"]["containers"]
    names = tuple(word.partition("=")[2] for word in container["args"] if word.startswith("--allow-host="))
    check_hosts(names)
    asked = OwnNames(names=names, is_local=False)
    service = ("store", "store.data", "store.data.svc", "store.data.svc.cluster.local")
    for name in (*service, *(f"store-0.{name}" for name in service)):
        assert asked.refusal("GET", "/v1/health", [(b"host", f"{name}:7070".encode())]) is None
    assert asked.refusal("GET", "/v1/health", [(b"host", b"store.data.example")]) is not None


def test_an_option_that_the_chart_sets_cannot_be_given_twice():
    text = (CHART / "templates" / "statefulset.yaml").read_text()
    named = set(options_of(text))
    assert named <= OPTIONS
    assert len(named) == 16
    for option in named - {"--allow-host"}:  # which adds names to those of the service
        assert refused({"node.extraArgs": [option]})
        assert refused({"node.extraArgs": [f"{option}=x"]})


def test_values_that_are_switched_off_leave_their_objects_out():
    values = values_of("s3")
    values["networkPolicy"]["enabled"] = values["podDisruptionBudget"]["enabled"] = False
    values["serviceAccount"]["name"] = "mine"
    made = {value["kind"] for text in list(rendered(values).values()) if (value := _object(text))}
    assert made == {"Service", "StatefulSet"}


def _object(text):
    value = yaml.safe_load(text) if "apiVersion" in text else None
    return value if isinstance(value, dict) else None


def test_the_schema_names_every_value_and_no_other():
    assert SCHEMA["properties"].keys() - {"global"} == values_of().keys()
    for name, value in values_of().items():
        known = SCHEMA["properties"][name].get("properties")
        if known and isinstance(value, dict):
            assert value.keys() <= known.keys(), name


def test_the_chart_is_of_the_version_of_frostline():
    from frostline.core.system import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert str(chart["appVersion"]) == __version__


def test_the_node_has_the_paths_that_probes_ask():
    class NoNode:
        """Has what the routes look at when they are made."""

        from frostline.core.config import NodeSettings

        settings = NodeSettings(memory_bytes=64 << 20)
        trainings = None

    paths = {route.path for route in make_app(NoNode()).routes}
    assert {"/v1/health", "/v1/ready", "/v1/openapi.json", "/v1/metrics"} <= paths


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_say(case):
    if shutil.which("helm") is None:
        pytest.skip("there is no helm here: the templates are rendered by tests/support/chart.py alone")
    file = CHART / "ci" / f"{case}-values.yaml"
    subprocess.run(["helm", "lint", "--strict", str(CHART), "--values", str(file)], check=True)
    command = ["helm", "template", "store", str(CHART), "--namespace", "data", "--values", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    made = {value["kind"]: value for value in yaml.safe_load_all(said) if value}
    assert made == objects(case)


def test_the_renderer_knows_no_more_than_it_says():
    values = deepcopy(values_of("s3"))
    del values["replicas"]
    with pytest.raises(KeyError):
        rendered(values)
