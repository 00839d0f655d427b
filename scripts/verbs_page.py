"""Makes the site's page of verbs from the command line itself: what each does, its example and all of its options.

A hook of MkDocs: the site takes the page as it is built, so that none is kept and none can be out of date.
"""

import re

import click

PAGE = "verbs.md"
HEAD = """# Verbs

Every verb of `frostline` with all of its options, as `--help-all` has them; `--help` shows those that most jobs need.
This page is made with the site.
"""


def page():
    from frostline.cli.commands import verbs

    parts = [part for name, command in sorted(verbs.commands.items()) for part in _parts(name, command)]
    return "\n".join([HEAD, *parts])


def _parts(name, command):
    yield f"## {name}\n" if " " not in name else f"### {name}\n"
    yield "\n\n".join(map(_plain, (command.help or "").split("\n\n"))) + "\n"
    if command.epilog:
        yield f"```console\n$ {command.epilog.partition('Example: ')[2]}\n```\n"
    if isinstance(command, click.Group):
        for inner, verb in sorted(command.commands.items()):
            yield from _parts(f"{name} {inner}", verb)
    else:
        yield from _tables(command)


def _tables(command):
    from frostline.cli.options import sections_of

    context = click.Context(command)
    for section, options in sections_of(command):
        yield f"| {section} | |\n| --- | --- |"
        for option in options:
            names, text = option.get_help_record(context)
            yield f"| `{_cell(names)}` | {_cell(text)} |"
        yield ""


def _plain(text):
    return re.sub(r"\s+", " ", text.replace("\b", "")).strip().replace("<", "&lt;")


def _cell(text):
    return _plain(text).replace("|", "\\|")


def on_files(files, config):
    """Give MkDocs the page of verbs."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files
