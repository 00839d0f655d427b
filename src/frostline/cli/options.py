"""Options that several verbs share, so that one name means one thing, the settings they make, and how help shows them.

Help shows options by what they are about. Of a verb with many it shows the twenty that most jobs need, each by its
first sentence, and ``--help-all`` shows all of everything.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.units import ACCURACY, BYTES, in_binary
from frostline.control.settings import NO_CONTROL
from frostline.core import FLOAT32
from frostline.core.audit import AuditLog, audit_file
from frostline.core.config import CHANGED, LoaderSettings, NodeSettings, ServerTls, default_node_memory_bytes
from frostline.core.errors import DataNotFound, SettingError
from frostline.core.hints import synonym
from frostline.planning import POLICIES
from frostline.stores.urls import parse_url
from frostline.training.settings import JobSettings
from frostline.wire.recipes import FEW_EPOCHS

if TYPE_CHECKING:  # of those that keep to a control plane; others do without
    from frostline.control.reporter import ControlLink

__all__ = (
    "NODE_MEMORY",
    "VerbCommand",
    "VerbGroup",
    "allowed_hosts_option",
    "as_json",
    "audit_log",
    "audit_option",
    "changed_option",
    "command",
    "control_link",
    "control_option",
    "data_options",
    "epochs_option",
    "file_column_option",
    "format_option",
    "job_options",
    "label_option",
    "list_locally_option",
    "list_option",
    "node_options",
    "node_setting",
    "policy_option",
    "roots_there",
    "section_of",
    "sections_of",
    "server_tls",
    "setting_option",
    "settings_of",
    "tls_options",
    "where_option",
)

Verb = Callable[..., int | None]


class _SettingOption(click.Option):
    """An option that is a field of some settings, whose default it has where ``options`` say no other.

    Args:
        names: names of the option, as of ``click.Option``.
        of: class of the settings.
        field: name of the field.
        **options: keyword arguments of ``click.Option``.
    """

    def __init__(self, names: Sequence[str], *, of: type, field: str, **options: Any) -> None:
        default = {known.name: known.default for known in fields(of)}[field]
        if "bytes" in field:
            options = {"type": BYTES, **options}
            default = in_binary(default) if isinstance(default, int) else None
        elif field.endswith("_s"):
            options = {"metavar": "SECONDS", **options}
        if default is False:
            options["is_flag"] = True
        elif default == ():
            options["multiple"] = True
        elif default is not None:
            options = {"default": default, "show_default": True, **options}
        super().__init__(names, **options)
        self.of, self.field = of, field


def setting_option(of: type, field: str, *names: str, **options: Any) -> Callable[[Verb], Verb]:
    """An option that is a field of some settings, which ``settings_of`` takes from what a verb gets.

    Args:
        of: class of the settings.
        field: name of the field, which gives the option its default and the way that it is written.
        *names: names of the option, as of ``click.option``.
        **options: arguments of ``click.option`` for all else.
    """
    return click.option(*names, cls=_SettingOption, of=of, field=field, **options)


node_setting = partial(setting_option, NodeSettings)
_loader_setting = partial(setting_option, LoaderSettings)


def settings_of(of: type, options: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of some settings out of the options that a verb gets, by the names of the fields."""
    known = click.get_current_context().command.params
    asked = [param for param in known if isinstance(param, _SettingOption) and param.of is of]
    return {param.field: options.pop(param.name or "") for param in asked}


NO_AUDIT = "none"
"""The file of whoever keeps no audit log."""

NODE_MEMORY = "a quarter of the machine's or container's memory; on a small one 6GiB, or half of it"
"""What a node's memory is where nothing says how much."""

control_option = click.option(
    "--control",
    metavar="URL",
    help='URL of the control plane to report to, whose limits are kept; "none" uses none. Default: FROSTLINE_CONTROL.',
)


allowed_hosts_option = click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name, and its subdomains, under which the server may be addressed when it has no tenants; IP addresses "
    "and localhost always work. Web pages from that host may call it. May be repeated.",
)


audit_option = click.option(
    "--audit",
    metavar="FILE|none",
    help='File to which reads, uploads, changes and refusals are appended as lines of JSON, with who made them; "none" '
    "writes none. Default: a file per port under audit/ in the user's cache folder. It is rotated at 64 MiB, and "
    "four older files are kept.",
)


def audit_log(said: str | None, server: str, port: int) -> AuditLog:
    """The audit log that the option says.

    Raises:
        SettingError: The file that it names cannot be written.
    """
    log = AuditLog(None if said == NO_AUDIT else audit_file(server, port) if said is None else Path(said))
    if said is not None:  # whoever asks for one learns at once that there would be none
        log.require()
    return log


_TLS = (
    click.option(
        "--tls-cert",
        metavar="FILE",
        help="Serve https:// with this PEM certificate, as frostline cert writes it. A renewed file is used from the "
        "next connection on.",
    ),
    click.option("--tls-key", metavar="FILE", help="Private key of --tls-cert, if it is in another file."),
    click.option(
        "--tls-client-ca",
        metavar="FILE",
        help="Accept only clients with a certificate signed by an authority in this file; clients set "
        "FROSTLINE_TLS_CERT.",
    ),
)


def tls_options(verb: Verb) -> Verb:
    """How a server encrypts; ``server_tls`` takes what the verb gets."""
    return _with(_TLS, verb)


def server_tls(tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None) -> ServerTls | None:
    """The files by which a server encrypts, as the options say them; None where it does not.

    Raises:
        SettingError: A file for TLS is named, and no certificate.
    """
    if tls_cert is not None:
        return ServerTls(cert=tls_cert, key=tls_key, client_ca=tls_client_ca)
    if tls_key or tls_client_ca:
        raise SettingError("--tls-key and --tls-client-ca need the certificate of --tls-cert")
    return None


def control_link(url: str | None) -> "ControlLink | None":
    """The way to the control plane that the option or the environment names, by the token of the environment.

    Raises:
        SettingError: The URL is none.
    """
    asking = LoaderSettings()
    if not (url or asking.control) or (url or asking.control) == NO_CONTROL:
        return None
    from frostline.control.reporter import ControlLink

    return ControlLink(url or asking.control or "", asking.token)


as_json = click.option("--json", "as_json", is_flag=True, help="Print only the result, as JSON, on stdout.")

format_option = click.option(
    "--format",
    metavar="NAME",
    help="Format of the data, if files of several formats are there: folders, masks, webdataset, parquet "
    "(parquet:COLUMN for texts), arrow, urls, cql, ready or tar.gz.",
)
file_column_option = click.option(
    "--file-column",
    metavar="COLUMN",
    help="Column of lists with each sample's file: path, URL or id. Default: found by name or values.",
)
label_option = click.option(
    "--label",
    metavar="COLUMN",
    help="Column whose values are the labels, such as category. Default: the one named label, cls or class.",
)
changed_option = click.option(
    "--on-change",
    type=click.Choice(CHANGED),
    default=CHANGED[0],
    show_default=True,
    help="Policy for objects that changed after they were listed: skip leaves them out, rebuild lists again before the "
    "first epoch, refuse stops.",
)
list_option = click.option(
    "--relist/--no-relist",
    "relist",
    default=True,
    show_default=True,
    help="List the data before starting. --no-relist reuses the last manifest without listing the store.",
)
list_locally_option = click.option(
    "--list-locally",
    is_flag=True,
    help="List the data from this machine, with your own credentials. By default the node given by --near lists it, "
    "unless the data is a folder that both can see.",
)
where_option = click.option(
    "--where", metavar="SELECTION", help="Samples to use, such as \"label != 'trash' and length < 200000\"."
)


def roots_there(_: click.Context, __: click.Parameter, roots: tuple[str, ...]) -> tuple[str, ...]:
    """The roots of a service that reads data, as ``--data-root`` calls it back. Only folders are looked at.

    Raises:
        DataNotFound: a root is a folder that does not exist.
    """
    for root in map(parse_url, roots):
        if root.scheme == "file" and not Path(root.path).exists():
            raise DataNotFound(f"--data-root: there is no folder {root.path}")
    return roots


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What options are about, by their parameters' names, in the order in which help shows them. What is in none of these
# stands in the section that its beginning says, and else in the last one.
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Data": _names(
        """source destination run steps data roots format source_format column file_column label where split shares by
        relist list_locally on_change manifest_location checks samples tokenizer max_length
        max_skipped_fraction allow_nonfinite resize preprocess dtype follow_links listing_memory max_listed
        max_manifest"""
    ),
    "Network": _names("model until weights weight_folders accuracy policy rule cut codec engines"),
    "Node": _names(
        """near memory device nodes address namespace min_nodes max_nodes port read_threads local_tier local_tier_size
        trials cache_folder cache_size cached_augmentations shared_cache shared_cache_size shared_cache_wait batching
        max_requests min_upload_rate device_batch threads max_run max_operation node_memory ray_memory window
        path timeout executor workers bandwidth store_speed trainer_speed trainer_memory separate_machines control"""
    ),
    "Access": _names(
        """listen tenants allow_anonymous is_open allowed_hosts control_config config prices audit days names is_client
        is_revoked"""
    ),
    "Training": _names(
        """epochs batch_size learning_rate optimizer weight_decay schedule warm_up patience targets loss task
        label_smoothing metrics lora unfreeze bf16 augment seed val_share val_split allow_training training_memory"""
    ),
    "Output": _names(
        """out resume checkpoint_every part_size object_size html log_format trace as_json verify measure every once
        status metrics_address state forget_changes"""
    ),
}
_BEGINNINGS: Mapping[str, str] = {"ca": "Access", "cert": "Access", "key": "Access", "tls": "Access"}
_REST = "Other"
# Help of a verb with more options than the first is short, and shows no more of them than the second.
_ARE_MANY, _MAX_SHOWN = 15, 20
# Of a verb with many options, those that help shows: the first ones that it has.
_SHOWN_FIRST = _names(
    """run data roots model until weights near out resume epochs batch_size learning_rate loss targets lora augment
    metrics accuracy label split seed as_json listen tenants allow_anonymous allowed_hosts memory device nodes min_nodes
    max_nodes allow_training weight_folders cache_folder bandwidth store_speed trainer_speed rule measure every html
    executor part_size where log_format control control_config engines"""
)
_ALL = "frostline.help_all"


def section_of(name: str) -> str:
    """What an option is about, by its parameter's name."""
    found = next((section for section, names in _SECTIONS.items() if name in names), None)
    return found or _BEGINNINGS.get(name.partition("_")[0], _REST)


# Commands of other programs, by ours.
_VERBS: Mapping[str, str] = {
    **dict.fromkeys(("finetune", "fine-tune", "fit", "run"), "train"),
    **dict.fromkeys(("classify", "eval", "evaluate", "infer", "inference", "score", "test"), "predict"),
    **dict.fromkeys(("embed", "encode", "features"), "extract"),
    **dict.fromkeys(("convert", "copy", "download", "import", "pack", "upload"), "ingest"),
    **dict.fromkeys(("describe", "list", "ls", "split", "stats"), "index"),
    **dict.fromkeys(("bench", "benchmark", "cost", "estimate", "profile"), "plan"),
    **dict.fromkeys(("node", "server", "start", "up"), "serve"),
    **dict.fromkeys(("check", "diagnose", "env", "info"), "doctor"),
    **dict.fromkeys(("monitor", "ps", "status"), "top"),
}
# Options of other programs that have no counterpart here, and what to do instead.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("num_workers", "pin_memory", "prefetch_factor", "workers"), "Reading ahead tunes itself, so leave it out."
    ),
    **dict.fromkeys(
        ("amp", "fp16", "half", "mixed_precision", "precision"),
        "Write --accuracy fp16 for the frozen layers, or --bf16 for the head.",
    ),
    **dict.fromkeys(("bind", "host", "port"), "Write --listen 0.0.0.0:7070."),
    **dict.fromkeys(
        ("debug", "quiet", "verbose"), "Write --log-format json for every event, or --json for the result."
    ),
    **dict.fromkeys(("accelerator", "devices", "gpu", "gpus"), "Write --device cuda."),
    "pretrained": "Weights come with the name of the model; --weights random takes none.",
    **dict.fromkeys(
        ("eval_data", "test_data", "val_data", "validation_data"),
        "Write --val-share 0.2, or --val-split NAME for a split of --data.",
    ),
    **dict.fromkeys(
        ("image_size", "img_size", "input_size", "preprocess", "size", "transform"),
        "Images are made as the weights of the network take them, so leave it out.",
    ),
    **dict.fromkeys(("early_stop", "early_stopping"), "Write --patience 5."),
    **dict.fromkeys(
        ("config", "config_file", "params"),
        "No file of options is read, so write them out, or --resume DIR takes those of a run.",
    ),
    **dict.fromkeys(
        ("logger", "mlflow", "report_to", "tensorboard", "wandb"),
        "Write --json for the result, or --log-format json for every event.",
    ),
    "what_if": "Write --bandwidth 100Mbit, or --nodes 2, or --store-speed 0.5.",
}
# What arguments without a name are called by other programs.
_UNNAMED = _names("src source input data dst dest destination output out target")
# Parameters that other programs take without a name.
_PLACES = _names("data roots")


def _instead(name: str, known: Iterable[str]) -> str:
    """What to write in place of an option of other programs, as far as a verb has the options; empty for nothing."""
    options = set(known)
    ways = _INSTEAD.get(name, "").removesuffix(".").removeprefix("Write ").split(", or ")
    fit = ", or ".join(way for way in ways if set(re.findall(r"--[\w-]+", way)) <= options)
    return f"{'Write ' if fit.startswith('--') else ''}{fit}." if fit else ""


class VerbGroup(click.Group):
    """Verbs, of which those of other programs lead to ours."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that is meant."""
        if args[0] in ("help", "version") and args[0] not in self.commands:
            verb = args[1:2] if args[0] == "help" else []
            raise click.UsageError(
                f"No such command {args[0]!r}. Write {' '.join([ctx.command_path, *verb, f'--{args[0]}'])}.", ctx=ctx
            )
        if (meant := _VERBS.get(args[0])) and args[0] not in self.commands:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {meant!r}?", ctx=ctx)
        return super().resolve_command(ctx, args)


class VerbCommand(click.Command):
    """A verb whose help shows options by what they are about, and few of many.

    Args:
        *args: arguments of ``click.Command``.
        first: names of the parameters that help shows where they are many.
        **options: keyword arguments of ``click.Command``.
    """

    def __init__(self, *args: Any, first: Sequence[str] = _SHOWN_FIRST, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shown_first = first

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with ``--help-all`` where there are many."""
        params = super().get_params(ctx)
        return [*params, _HELP_ALL] if len(self.params) > _ARE_MANY else params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The values of the options; one of other programs leads to ours, and a missing one says its help."""
        arguments = [param for param in self.params if isinstance(param, click.Argument)]
        unnamed = "" if arguments or not args or args[0].startswith("-") else args[0]
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if error.param is None:
                raise
            help = str(getattr(_shortened(error.param), "help", None) or "")
            value = error.param.make_metavar(ctx)
            begun = help[:1] if help[1:2].isupper() else help[:1].lower()  # TOML stays as it is
            says = f"Write {error.param.opts[0]} {value}: {begun}{help[1:]}" if help else ""
            if unnamed and error.param.name in _PLACES:
                says = f"Write {error.param.opts[0]} {unnamed}."
            raise click.MissingParameter(says, ctx=error.ctx, param=error.param) from error
        except click.NoSuchOption as error:
            names = {opt.lstrip("-").replace("-", "_"): opt for param in self.params for opt in param.opts}
            given_name = error.option_name.lstrip("-").replace("-", "_")
            meant = synonym(given_name, names)
            instead = f"Did you mean {names[meant]!r}?" if meant else _instead(given_name, names.values())
            if arguments and not instead and given_name in _UNNAMED:
                instead = f"Write {' '.join([ctx.command_path, *(param.make_metavar(ctx) for param in arguments)])}."
            if not instead:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}. {instead}", ctx=ctx) from error
        except click.UsageError as error:
            names = {str(param.name): param.opts[0] for param in self.params}
            place = next((names[name] for name in _PLACES if name in names), "")
            if not unnamed or not place or type(error) is not click.UsageError:
                raise
            raise click.UsageError(f"{error.message}. Write {place} {unnamed}.", ctx=ctx) from error

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the verb does; its first paragraph alone where help is short."""
        if self._is_short(ctx):
            short = copy.copy(self)
            short.help = (self.help or "").partition("\n\n")[0]
            super(VerbCommand, short).format_help_text(ctx, formatter)
        else:
            super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, each in the section of what it is about."""
        is_short = self._is_short(ctx)
        sections: dict[str, list[tuple[str, str]]] = {section: [] for section in (*_SECTIONS, _REST)}
        for param in self.shown_options(is_short=is_short):
            record = (_shortened(param) if is_short else param).get_help_record(ctx)
            if record is not None:
                sections[section_of(param.name or "")].append(record)
        for section, records in sections.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)
        if is_short:
            left = len(self.params) - len(self.shown_options(is_short=True))
            more = f"{left} more options, and the full text of these" if left else "The full text of these"
            formatter.write(f"\n{more}: --help-all\n")

    def shown_options(self, *, is_short: bool) -> list[click.Parameter]:
        """The parameters that help shows, those of a section in its order."""
        places = {name: place for place, name in enumerate(name for names in _SECTIONS.values() for name in names)}
        known = self._first() if is_short else self.params
        return sorted(known, key=lambda param: places.get(param.name or "", len(places)))

    def _first(self) -> list[click.Parameter]:
        if len(self.params) <= _MAX_SHOWN:
            return self.params
        by_name = {param.name: param for param in self.params}
        return [by_name[name] for name in self._shown_first if name in by_name][:_MAX_SHOWN]

    def _is_short(self, ctx: click.Context) -> bool:
        return len(self.params) > _ARE_MANY and not ctx.meta.get(_ALL)


def _shortened(param: click.Parameter) -> click.Parameter:
    """The same with the first sentence of its help."""
    if not isinstance(param, click.Option) or not param.help:
        return param
    param = copy.copy(param)
    first = re.split(r"[.;] ", param.help or "", maxsplit=1)[0]
    param.help = f"{first.removesuffix('.')}."
    return param


command = partial(click.command, cls=VerbCommand)
"""Makes a verb of a function, as ``click.command``."""


def _show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show every option with its full text, and exit.",
)


def sections_of(command: click.Command) -> Iterator[tuple[str, list[click.Option]]]:
    """A verb's options by what they are about, for a page of them."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    for section, names in {**_SECTIONS, _REST: ()}.items():
        found = [option for option in options if section_of(option.name or "") == section]
        if found:
            yield section, sorted(found, key=lambda option: _place(option.name or "", names))


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


_NODE = (
    node_setting(
        "memory_bytes",
        "--memory",
        default=default_node_memory_bytes,
        show_default=NODE_MEMORY,
        help="Memory of the node for weights, samples and answers. The idle process, a trial of an engine (one at a "
        "time, at most half as much again) and --training-memory come on top.",
    ),
    node_setting(
        "device",
        "--device",
        help="Device on which the node runs networks, such as cpu or cuda; work is shared among several, such as "
        "cuda:0,cuda:1.",
    ),
    node_setting(
        "read_threads",
        "--read-threads",
        type=click.IntRange(min=1),
        help="Number of samples that the node requests from a remote store at once; more hides a longer round trip.",
    ),
    node_setting(
        "local_tier",
        "--local-tier",
        metavar="DIR",
        help="Folder in which the node caches encoded samples of remote stores, so that later epochs need not read them"
        " again. Default: in the user's cache folder.",
    ),
    node_setting(
        "local_tier_bytes",
        "--local-tier-size",
        help="Maximum bytes of --local-tier; 0 disables it. Default: a quarter of the free disk, at most 50 GiB.",
    ),
    node_setting(
        "trial_s",
        "--trials",
        type=click.FloatRange(min=0),
        help="Maximum seconds for benchmarking inference engines on a network that is new to the node; 0 disables it.",
    ),
)
_DATA = (
    click.option("--data", required=True, metavar="URL", help="Folder or URL of the data."),
    format_option,
    click.option(
        "--column",
        metavar="NAME|INPUT=NAME,...",
        help="Column of Parquet files that holds the samples: texts, lists of numbers, or encoded images or sounds. For"
        " a network with several inputs, a column for each: pixel_values=image,input_ids=caption.",
    ),
    file_column_option,
    label_option,
    list_option,
    changed_option,
    where_option,
    click.option(
        "--split",
        metavar="NAME",
        help="Name of the split to use, which the data defines or frostline index --split saved.",
    ),
    click.option(
        "--near",
        multiple=True,
        metavar="URL",
        help="URL of a node beside the data. May be repeated to share the work between nodes. dns://SERVICE:PORT stands"
        " for all addresses of a host name, dns+https:// for the same over TLS, file:///PATH for a JSON list, "
        "ray://NAMESPACE for nodes under Ray; nodes may come and go. Without it a node is started on this machine "
        "for the job.",
    ),
    list_locally_option,
    click.option(
        "--accuracy",
        type=ACCURACY,
        default=FLOAT32,
        show_default=True,
        metavar="exact|float32|bf16|fp16|int8|ERROR",
        help="Error that inference engines and compression may cause at most. exact: none; float32: rounding, at most "
        "1e-4; bf16, fp16, int8: that of computing and sending in these types; or a relative error such as 0.01.",
    ),
    _loader_setting(
        "max_skipped_fraction",
        "--max-skipped-fraction",
        metavar="SHARE",
        help="Share of the samples that may be unreadable before the job stops.",
    ),
    _loader_setting(
        "allow_nonfinite",
        "--allow-nonfinite",
        help="Count samples for which the frozen layers give Inf or NaN and continue. By default the job stops at the "
        "first.",
    ),
)
_JOB = (
    *_DATA,
    click.option(
        "--model",
        required=True,
        metavar="NAME",
        help="Network: torchvision:NAME, timm:NAME, hf:OWNER/NAME, hf:FOLDER, package.module:factory or "
        "demo:efficientnet_lite0.",
    ),
    click.option(
        "--until",
        required=True,
        metavar="LAYER",
        help="Last frozen module, such as layer3, or 'features' for all but the classifier. For a network with several "
        "encoders, join one of each by +.",
    ),
    click.option(
        "--weights",
        metavar="FILE|random",
        help="safetensors file with the state_dict of the whole network. Default: the pretrained weights of --model, "
        "downloaded once into its library's cache. 'random' uses untrained weights.",
    ),
    click.option(
        "--tokenizer",
        metavar="FILE|hf:NAME",
        help="Tokenizer of a network that takes texts: tokenizer.json, hf:FOLDER or hf:OWNER/NAME. Default: the one in "
        "the folder of an hf: model.",
    ),
    click.option(
        "--max-length",
        type=click.IntRange(min=1),
        metavar="TOKENS",
        help="Number of tokens to which every text is padded or truncated. Default: 128, or the network's number of "
        "positions if that is smaller.",
    ),
    click.option(
        "--samples",
        metavar="KIND",
        help="Kind of the samples: images, sounds:SECONDS (log-mel spectrograms), waves:SECONDS (both with @RATE if it "
        "is not 16000) or arrays:SHAPE, such as arrays:12x5000. By default sounds and arrays are recognised by "
        "their suffixes, and sounds are as long as the longest of 16 of them, at most 10 seconds. For several "
        "inputs, name them: signal=arrays:12,input_ids=texts.",
    ),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        help="Seed of the order, the split, newly initialised layers and augmentation.",
    ),
    click.option(
        "--cut",
        type=int,
        metavar="N",
        help="Number of the cut to use, the layer after which the trainer takes over, instead of the planned ones; "
        "frostline plan lists them.",
    ),
    click.option(
        "--codec",
        metavar="NAME",
        help="Codec that compresses the activations at --cut. Default: the fastest that --accuracy allows.",
    ),
    _loader_setting(
        "cache_folder",
        "--cache",
        "cache_folder",
        metavar="DIR",
        help="Folder on this machine in which features are kept on disk, so that later jobs need not fetch them again. "
        "Default: the user's cache folder, where the node is on another machine.",
    ),
    _loader_setting("cache_disk_bytes", "--cache-size", help="Maximum bytes of features on disk; 0 keeps none."),
    _loader_setting(
        "cached_augmentations",
        "--cached-augmentations",
        metavar="V",
        help="Number of random augmentations cached per sample: epoch e uses number e mod V. 0 draws new ones each "
        "epoch and caches none.",
    ),
)

policy_option = click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default=POLICIES[0],
    show_default=True,
    help="Rule that chooses the cut: best takes the fastest mixture of cuts, baseline sends the encoded samples as a "
    "plain loader does, all_in_store also trains the head at the node. The others are published rules to compare with.",
)

epochs_option = click.option(
    "--epochs",
    type=int,
    metavar="N",
    help="Number of passes over the training samples. Default: until the held-out loss no longer falls, or "
    f"{FEW_EPOCHS} if features are not kept between epochs.",
)


def job_options(verb: Verb) -> Verb:
    """What a job is about: data, model, frost line, node. The verb gets it whole, as ``job: JobSettings``.

    An option of the verb's own that is named like a field of ``JobSettings`` becomes part of it too.
    """

    @wraps(verb)
    def with_job(*, node: NodeSettings, near: Sequence[str], **options: Any) -> int | None:
        loader = LoaderSettings(**settings_of(LoaderSettings, options))
        options["near"], options["also_near"] = next(iter(near), None), tuple(near[1:])
        asked = {field.name: options.pop(field.name) for field in fields(JobSettings) if field.name in options}
        return verb(job=JobSettings(**asked, loader=loader, node=node), **options)

    return _with(_JOB, node_options(with_job))


def data_options(verb: Verb) -> Verb:
    """Which data, read how accurately and by whom. The verb gets what was said by name, and ``node: NodeSettings``."""
    return _with(_DATA, node_options(verb))


def node_options(verb: Verb) -> Verb:
    """What a node may use. The verb gets it whole, as ``node: NodeSettings``."""

    @wraps(verb)
    def with_node(**options: Any) -> int | None:
        return verb(node=NodeSettings(**settings_of(NodeSettings, options)), **options)

    return _with(_NODE, with_node)


def _with(options: Sequence[Callable[[Verb], Verb]], verb: Verb) -> Verb:
    for option in reversed(options):
        verb = option(verb)
    return verb
