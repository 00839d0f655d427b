"""The queries of the dashboard of Grafana, held to what a live scrape has."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PREFIXES = ("frostline_node_", "frostline_io_", "frostline_control_", "frostline_job_")
_FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "frostline.json"


def dashboard():
    return json.loads(_FILE.read_text(encoding="utf-8"))


def queries(prefix):
    """Those over metrics of this prefix; each query of the dashboard has one of the prefixes alone."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    for query in found:
        assert sum(one in query for one in PREFIXES) == 1, query
    return [query for query in found if prefix in query]


def check_queries(prefix, families):
    """The number of queries over this prefix, all of whose metrics and labels these families, or this text, have."""
    families = list(text_string_to_metric_families(families)) if isinstance(families, str) else list(families)
    samples = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for query in queries(prefix):
        names = re.findall(r"frostline_\w+", query)
        assert set(names) <= samples.keys(), query
        labels = {label for name in names for label in samples[name]} | {"instance", "job"}
        grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
        chosen = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", query))
        assert grouped | chosen <= labels, query
    return len(queries(prefix))
