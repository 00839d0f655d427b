"""Write what a set of packages consists of as CycloneDX: names, versions and hashes of its lock, and licences.

    python scripts/sbom.py node

Licences are what the packages say of themselves, where they are installed here; of others none is said.
"""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = re.compile(r"^([A-Za-z0-9._-]+)==([^ \\;]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def locked(text):
    """Name, version and hashes of each package of a lock."""
    found = []
    for line in text.splitlines():
        if package := _PACKAGE.match(line):
            found.append((package[1], package[2], []))
        elif digest := _HASH.search(line):
            found[-1][2].append(digest[1])
    return found


def licence_of(name):
    """The licence that an installed package names; empty where it is not here or names none."""
    try:
        about = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    classified = [
        line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if line.startswith("License ::")
    ]
    said = about.get("License-Expression") or " AND ".join(classified) or about.get("License") or ""
    return said.strip().partition("\n")[0][:200]


def bill(name):
    """The bill of a lock of ``requirements``."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "frostline",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [
            {
                "type": "library",
                "name": package,
                "version": version,
                "purl": f"pkg:pypi/{package}@{version}",
                # One of each file that a machine may take: of every platform.
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
                "licenses": [{"license": {"name": licence}}] if (licence := licence_of(package)) else [],
            }
            for package, version, digests in locked((ROOT / "requirements" / f"{name}.txt").read_text())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(bill(sys.argv[1]), indent=1))
