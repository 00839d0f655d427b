"""Runs a node and its control plane in a process of their own until its parent closes its stdin."""

import json
import os
import sys
import threading
from typing import Any

import torch

from frostline.control.embedded import control_routes, embedded_settings
from frostline.control.reporter import ControlLink, follow_control
from frostline.control.settings import NO_CONTROL
from frostline.core.audit import AuditLog, audit_file
from frostline.core.config import LoaderSettings, NodeSettings, ServerTls, TenantSettings
from frostline.core.errors import UserError
from frostline.core.processes import answer_starter
from frostline.node.http.server import Server, listen
from frostline.node.inspection import Inspector, kept_inspections
from frostline.node.service import Node

__all__ = ("main",)

# Answers get a few seconds to end, but a node that hangs must not outlive its parent.
_LONGEST_STOP_S = 10.0


def main(argument: str) -> int:
    """Run a node as described by a JSON object: ``host``, ``port``, ``roots``, ``settings``, ``control``, ``reports``.

    Prints one line of JSON: ``url`` once it listens, or ``error`` and ``message`` if it cannot.
    """
    wanted = json.loads(argument)
    settings = _settings(wanted["settings"])
    # This comes first: the inspector is a fork of this process, which has imported torch and has no threads yet.
    with Inspector(fork=True, kept=kept_inspections()) as inspector:
        torch.set_num_threads(settings.compute_threads)
        return _serve(wanted, settings, inspector)


def _serve(wanted: dict[str, Any], settings: NodeSettings, inspector: Inspector) -> int:
    try:
        listening = listen(
            wanted["host"], wanted["port"], for_others=bool(settings.tenants) or settings.allow_anonymous
        )
        link = _link(wanted)
        port = listening.getsockname()[1]
        # The node of a job serves that job alone.
        audit = AuditLog(audit_file("node", port) if wanted["reports"] else None)
        node = Node(settings, tuple(wanted["roots"]), inspector, audit)
    except UserError as error:
        answer_starter({"error": type(error).__name__, "message": str(error)})
        return 2
    with node, follow_control(node, link):
        routes = control_routes(embedded_settings(settings, control=wanted["control"]))
        server = Server(node, listening, routes=routes)
        threading.Thread(target=_stop_with_parent, args=(server,), daemon=True).start()
        threading.Thread(target=node.warm, daemon=True).start()
        server.run(on_ready=lambda: answer_starter({"url": server.url}))
    return 0


def _link(wanted: dict[str, Any]) -> ControlLink | None:
    """The way to the control plane that is wanted, or that the environment names; None where it reports to none."""
    environment = LoaderSettings()
    url = wanted["control"] or environment.control
    return None if not wanted["reports"] or url in (None, NO_CONTROL) else ControlLink(url, environment.token)


def _settings(value: dict[str, Any]) -> NodeSettings:
    tenants = [_tenant(tenant) for tenant in value["tenants"]]
    lists = {"tenants": tuple(tenants), "allowed_hosts": tuple(value["allowed_hosts"])}
    tls = value["tls"] and ServerTls(**value["tls"])
    return NodeSettings(**{**value, **lists, "tls": tls})


def _tenant(value: dict[str, Any]) -> TenantSettings:
    made: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return TenantSettings(**made)


def _stop_with_parent(server: Server) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    server.stop()
    if not server.wait(_LONGEST_STOP_S):
        os._exit(1)
