"""The verbs ``serve`` and ``control``: run a node beside the data, and divide a store between jobs."""

import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.logs import log, log_format_option
from frostline.cli.options import (
    allowed_hosts_option,
    as_json,
    audit_log,
    audit_option,
    command,
    control_link,
    control_option,
    node_options,
    node_setting,
    roots_there,
    server_tls,
    tls_options,
)
from frostline.cli.show import print_json_line, say
from frostline.core.config import BATCHING, NodeSettings, check_hosts
from frostline.core.errors import SettingError

if TYPE_CHECKING:
    from frostline.control.messages import Prices
    from frostline.core.tokens import FollowedFile

__all__ = ("cert", "control", "serve", "served_settings")


@command(epilog="Example: frostline serve --data-root s3://photos --listen 10.0.0.5:7070 --tenants tenants.toml")
@click.option(
    "--data-root",
    "roots",
    required=True,
    multiple=True,
    callback=roots_there,
    metavar="URL",
    help="Serve data under this URL; may be repeated.",
)
@click.option(
    "--listen",
    default="127.0.0.1:7070",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one. An address that other machines can reach needs --tenants or "
    "--allow-anonymous.",
)
@click.option(
    "--tenants",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of the users who may use the node, with weights and quotas. Without it anyone who reaches the "
    "address may.",
)
@node_setting(
    "allow_anonymous",
    "--allow-anonymous",
    "allow_anonymous",
    help="Listen beyond this machine without --tenants: anyone who can reach the address may use the node.",
)
@allowed_hosts_option
@tls_options
@node_setting(
    "batching",
    "--batching",
    type=click.Choice(BATCHING),
    help="Rule that forms batches for the device: fair, or hapi or fixed for comparison.",
)
@node_setting(
    "max_requests",
    "--max-requests",
    help="Maximum number of requests that are processed or waiting; further ones get status 429.",
)
@node_setting(
    "min_bytes_per_s",
    "--min-upload-rate",
    help="Drop uploads that are slower than this many bytes per second for a minute.",
)
@node_setting(
    "device_batch",
    "--device-batch",
    type=click.IntRange(min=1),
    help="Maximum number of samples that the network runs on at once, a multiple of 8.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of compute threads, and of decoding threads. Default: the number of cores.",
)
@node_setting(
    "max_run_s",
    "--max-run",
    type=click.FloatRange(min=0, min_open=True),
    help="Refuse networks for which a run of eight samples is estimated to take longer than this.",
)
@node_setting(
    "max_operation_s",
    "--max-operation",
    type=click.FloatRange(min=0, min_open=True),
    help="Refuse networks with a single operation that is estimated to take longer than this, since other requests wait"
    " for it.",
)
@click.option(
    "--engines",
    metavar="NAMES",
    help="Inference engines that may be tried, separated by commas. Default: all; '' tries none.",
)
@node_setting(
    "cache_folder",
    "--cache",
    "cache_folder",
    metavar="DIR",
    help="Folder in which features are kept on disk, for later epochs, jobs and tenants.",
)
@node_setting("cache_bytes", "--cache-size", help="Maximum bytes of the features in the folder of --cache.")
@node_setting(
    "shared_cache",
    "--shared-cache",
    metavar="URL",
    help="URL of a store in which features are kept for all nodes that are given the same URL.",
)
@node_setting(
    "shared_cache_bytes",
    "--shared-cache-size",
    help="Maximum bytes of the shared cache, counted over all nodes. Features not used for an hour are evicted, least "
    "recently used first.",
)
@node_setting(
    "shared_cache_wait_s",
    "--shared-cache-wait",
    help="Maximum seconds that a batch waits for the shared cache before its features are computed.",
)
@node_setting(
    "weight_folders",
    "--weights",
    "weight_folders",
    metavar="DIR",
    help="Folder with pretrained weights, such as a hub's cache; trainers need not upload weights that are in it. May "
    "be repeated.",
)
@node_setting("follow_links", "--follow-links", help="Allow symbolic links in folders to lead outside the data roots.")
@node_setting(
    "allow_training", "--allow-training", help="Allow clients to train heads on this node (policy all_in_store)."
)
@node_setting("training_memory_bytes", "--training-memory", help="Memory of the training process, on top of --memory.")
@node_setting(
    "listing_memory_bytes",
    "--listing-memory",
    help="Memory of a process that lists data for a client, one per tenant, on top of --memory.",
)
@node_setting(
    "max_listed",
    "--max-listed",
    type=click.IntRange(min=1),
    metavar="SAMPLES",
    help="Maximum number of samples in a data set that is listed for a client.",
)
@node_setting("max_manifest_bytes", "--max-manifest", help="Maximum bytes of a manifest that is sent to a client.")
@audit_option
@control_option
@click.option(
    "--control-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of the limits for the jobs on this node, as for frostline control. Without it nothing is limited.",
)
@click.option(
    "--prices",
    metavar="GB,HOUR,CURRENCY",
    help="Show the money that jobs save: price of a GB that crosses the link, price of a trainer's hour, currency, such"
    " as 0.09,1.20,USD.",
)
@node_options
@log_format_option
@as_json
def serve(
    roots: tuple[str, ...],
    listen: str,
    tenants: Path | None,
    control: str | None,
    audit: str | None,
    control_config: Path | None,
    prices: str | None,
    node: NodeSettings,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a node beside the data.

    It runs until Ctrl-C. Without --tenants, anyone who can reach the address can run networks on the data under the
    roots. So an address that other machines can reach needs --tenants, or --allow-anonymous if only your trainers can
    reach it. Jobs without a control plane report their progress to the node, whose address shows it as a web page;
    --control none turns that off. With --json, one line on stdout gives the address once the node is ready.
    """
    import torch

    from frostline.control.app import stage_routes
    from frostline.control.embedded import control_plane, embedded_settings, tenants_of
    from frostline.control.reporter import follow_control
    from frostline.node import Node
    from frostline.node.http.server import Server
    from frostline.node.http.server import listen as take_port
    from frostline.node.inspection import Inspector, kept_inspections

    host, port = _address(listen)
    link = control_link(control)
    node = served_settings(node, tenants=tenants, **options)
    plane = control_plane(embedded_settings(node, control_config, _prices(prices), control))
    routes = [] if plane is None else stage_routes(plane)
    # The inspector first: it is a copy of this process, which has torch and no threads yet.
    with (
        Inspector(fork=True, kept=kept_inspections()) as inspector,
        closing(take_port(host, port, for_others=bool(node.tenants) or node.allow_anonymous)) as listening,
        Node(node, roots, inspector, audit_log(audit, "node", listening.getsockname()[1])) as running,
        follow_control(running, link),
    ):
        torch.set_num_threads(node.compute_threads)
        if tenants is not None:
            file = running.follow_tenants(tenants)
            if plane is not None:
                plane.follow(file)
                running.on_renewal = lambda settings: plane.renew(tenants_of(settings))
            _at_hang_up(file)
        server = Server(running, listening, routes=routes)
        threading.Thread(target=running.warm, daemon=True).start()
        url = server.url
        server.run(
            on_ready=lambda: _say(url, running.health().roots, as_json=as_json),
            on_end=lambda: log("node_stopped", url=url),
        )


def _prices(text: str | None) -> "Prices | None":
    """Prices as they are typed.

    Raises:
        SettingError: The text is not two prices and a currency.
    """
    from frostline.control.messages import Prices

    if text is None:
        return None
    try:
        per_gb, per_hour, currency = text.split(",")
        return Prices(per_gb=float(per_gb), per_trainer_hour=float(per_hour), currency=currency.strip())
    except ValueError as error:
        raise SettingError(f"--prices takes GB,HOUR,CURRENCY, such as 0.09,1.20,USD, not {text!r}") from error


def served_settings(
    node: NodeSettings,
    *,
    tenants: Path | None,
    threads: int | None,
    engines: str | None,
    allowed_hosts: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
) -> NodeSettings:
    """Settings of a node that serves others, by those options of ``serve`` that are no field of them as they stand.

    Raises:
        SettingError: An option makes no sense.
    """
    from frostline.node.tenants import read_tenants

    return replace(
        node,
        decode_threads=threads or node.decode_threads,
        compute_threads=threads or node.compute_threads,
        engines=None if engines is None else _engines(engines),
        tenants=() if tenants is None else read_tenants(tenants),
        allowed_hosts=allowed_hosts,
        tls=server_tls(tls_cert, tls_key, tls_client_ca),
    )


def _engines(names: str) -> tuple[str, ...]:
    """Names of engines as they are typed.

    Raises:
        SettingError: No engine has that name.
    """
    from frostline.engines.catalog import OFFERS

    found = tuple(name.strip() for name in names.split(",") if name.strip())
    known = [offer.name for offer in OFFERS]
    for name in found:
        if name not in known:
            raise SettingError(f"--engines: there is no engine {name}; there are {', '.join(known)}")
    return found


_ADVICE = (
    "name its users with tables [[tenant]] in --config, or start it with --allow-anonymous if only your trainers can "
    "reach it"
)


@command(epilog="Example: frostline control --config control.toml --listen 10.0.0.5:7075")
@click.option(
    "--config",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of the resources, the tenants and the policies that divide the resources among the tenants.",
)
@click.option(
    "--listen",
    "address",
    default="127.0.0.1:7075",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one. An address that other machines can reach needs tenants in "
    "--config, or --allow-anonymous.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File in which the amounts that jobs hold are kept across restarts. Default: the name of --config with the "
    "suffix .state.",
)
@click.option("--allow-anonymous", "is_open", is_flag=True, help="Listen beyond this machine without tenants.")
@allowed_hosts_option
@tls_options
@audit_option
@click.option(
    "--forget-changes",
    is_flag=True,
    help="Discard changes that were made while the control plane ran, and use --config as it is.",
)
@log_format_option
@as_json
def control(
    config: Path,
    address: str,
    state: Path | None,
    is_open: bool,
    allowed_hosts: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    audit: str | None,
    forget_changes: bool,
    as_json: bool,
) -> None:
    """Run the control plane, which divides a store between jobs.

    It runs until Ctrl-C. Jobs use it by LoaderSettings.control, nodes and I/O services by --control, and all of them
    by FROSTLINE_CONTROL. They report to it every second and keep to the limits that it answers; when it is down they
    keep the last ones. With --json, one line on stdout gives the address once it is ready.
    """
    from frostline.control.app import ControlPlane, make_control_app
    from frostline.control.changes import ControlChanges
    from frostline.control.settings import read_control_settings
    from frostline.control.store import RecordStore
    from frostline.core.tokens import FollowedFile
    from frostline.node.http.server import AppServer, listen

    host, port = _address(address)
    check_hosts(allowed_hosts)
    tls = server_tls(tls_cert, tls_key, tls_client_ca)
    settings = read_control_settings(config)
    with (
        closing(listen(host, port, for_others=bool(settings.tenants) or is_open, advice=_ADVICE)) as listening,
        closing(RecordStore(state or config.with_suffix(".state"))) as store,
        closing(audit_log(audit, "control", listening.getsockname()[1])) as audited,
    ):
        if forget_changes:
            store.write({}, changes=ControlChanges())
        kept = store.state(settings, now_s=time.time())
        plane, is_asked_freely = ControlPlane(kept, store, audit=audited), not settings.tenants
        if settings.tenants:
            file = FollowedFile(config, lambda: plane.renew(read_control_settings(config).tenants))
            plane.follow(file)
            _at_hang_up(file)
        app = make_control_app(plane)
        server = AppServer(app, listening, is_open=is_asked_freely, names=allowed_hosts, tls=tls)
        server.run(on_ready=lambda: _say_control(server.url, as_json=as_json))


@command(epilog="Example: frostline cert --out certificates store-1 10.0.0.5")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="certificates",
    show_default=True,
    metavar="DIR",
    help="Folder for the authority (ca.pem and ca-key.pem, created once) and the certificates that it signs.",
)
@click.option(
    "--client",
    "is_client",
    is_flag=True,
    help="Make a certificate for a client, such as a trainer, instead of a server.",
)
@click.option(
    "--revoke",
    "is_revoked",
    is_flag=True,
    help="Revoke the certificates of these names, and write clients.pem, which servers take as --tls-client-ca.",
)
@click.option(
    "--days",
    type=click.IntRange(min=1),
    default=365,
    show_default=True,
    help="Number of days for which the certificate is valid.",
)
@as_json
def cert(names: tuple[str, ...], out: Path, is_client: bool, is_revoked: bool, days: int, as_json: bool) -> None:
    """Make a TLS certificate for a server or a client of your cluster.

    The authority that signs it is made first, if the folder has none; its key stays there. Give the names by which
    clients address the server: host names, the name of a service (dns+https://), or IP addresses. Copy ca.pem to all
    clients (FROSTLINE_TLS_CA), and to servers that ask clients for certificates (--tls-client-ca).
    """
    from frostline.wire.tls import Authority

    if is_client and len(names) > 1:
        raise SettingError("--client takes one name, which tells the client from others")
    authority = Authority(out)
    if is_revoked:
        clients = [authority.revoke(name) for name in names][-1]
        if as_json:
            print_json_line({"clients": str(clients)})
        else:
            say(f"{', '.join(names)}: revoked in {clients}; servers take it for --tls-client-ca, not {authority.ca}")
        return
    cert_file, key_file = authority.issue(names, is_client=is_client, days=days)
    if as_json:
        print_json_line({"ca": str(authority.ca), "cert": str(cert_file), "key": str(key_file)})
    elif is_client:
        say(
            f"{cert_file} and {key_file} are those of a client: FROSTLINE_TLS_CA={authority.ca} "
            f"FROSTLINE_TLS_CERT={cert_file} FROSTLINE_TLS_KEY={key_file}"
        )
    else:
        say(
            f"{cert_file} and {key_file} are those of a server: frostline serve --tls-cert {cert_file} --tls-key "
            f"{key_file}; its clients know it by FROSTLINE_TLS_CA={authority.ca}"
        )


def _at_hang_up(file: "FollowedFile") -> None:
    """Have a file read again after SIGHUP, which would end the process otherwise."""
    signal.signal(signal.SIGHUP, lambda *_: file.distrust())


def _say_control(url: str, *, as_json: bool) -> None:
    if as_json:
        print_json_line({"url": url})
    else:
        say(f"control plane ready at {url}; set FROSTLINE_CONTROL={url} for jobs to keep to it; Ctrl-C stops it")


def _say(url: str, roots: tuple[str, ...], *, as_json: bool) -> None:
    log("node_ready", url=url, roots=roots)
    if as_json:
        print_json_line({"url": url, "roots": list(roots)})
    else:
        say(f"node ready at {url}, serving {', '.join(roots)}; Ctrl-C stops it")


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingError(f"--listen takes HOST:PORT, such as 127.0.0.1:7070, not {listen!r}")
    return host.strip("[]"), int(port)
