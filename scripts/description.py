"""Makes the node's description in OpenAPI for the site, from the routes of a node and of the control plane within it.

The site takes it as it is built (a hook of MkDocs), so that none is kept; a node serves the same.

python scripts/description.py   # writes it to stdout
"""

import json
import sys
import tempfile
from pathlib import Path

PAGE = "openapi.json"


def description():
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    from frostline.control.embedded import control_routes, embedded_settings
    from frostline.core.config import NodeSettings
    from frostline.node import Node
    from frostline.node.http.app import describe_node, make_app

    with (
        tempfile.TemporaryDirectory() as folder,
        Node(NodeSettings(memory_bytes=64 << 20), (f"file://{folder}",)) as node,
    ):
        return describe_node(make_app(node, control_routes(embedded_settings(node.settings))))


def on_files(files, config):
    """Give MkDocs the description."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=json.dumps(description(), indent=1)))
    return files


if __name__ == "__main__":
    sys.stdout.write(json.dumps(description(), indent=1) + "\n")
