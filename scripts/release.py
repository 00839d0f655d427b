"""Releases a version: its section in CHANGELOG.md, its number in code and citation, a commit, a tag; nothing is sent.

    python scripts/release.py 0.1.0              # on a clean main: says what it will do, checks the wheel, then does it
    python scripts/release.py 0.1.0 --no-wheel   # where the wheel's first screen was run before

Afterwards `git push --follow-tags` sends both. The workflow then builds the wheel of the tag and runs its first screen,
and whoever may upload to the package index takes the wheel from there.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
VERSION = ROOT / "src" / "frostline" / "core" / "system.py"
CITATION = ROOT / "CITATION.cff"
README = ROOT / "README.md"
UNRELEASED = "## [Unreleased]\n"


def released(changelog, version, day):
    """The changelog with what was unreleased under a version, and an empty section above it."""
    if f"## [{version}]" in changelog:
        raise SystemExit(f"CHANGELOG.md has a version {version} already")
    head, found, rest = changelog.partition(UNRELEASED)
    if not found or not rest.partition("\n## [")[0].strip():
        raise SystemExit("CHANGELOG.md says nothing that is unreleased")
    head = head.replace(
        " Nothing has been released yet; the history before the first\nrelease is that of the repository.", ""
    )
    return f"{head}{UNRELEASED}\n## [{version}] - {day}\n{rest}"


def numbered(source, version):
    """The module that says the version, with another one."""
    text, count = re.subn(r'^__version__ = "[^"]*"$', f'__version__ = "{version}"', source, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{VERSION.relative_to(ROOT)} says no version")
    return text


def cited(citation, version, day):
    """The citation file with another version and its day."""
    rest = re.sub(r"^date-released: .*\n", "", citation, flags=re.MULTILINE)
    text, count = re.subn(r"^version: .*$", f"version: {version}\ndate-released: {day}", rest, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{CITATION.relative_to(ROOT)} says no version")
    return text


def installed(readme):
    """The README without what its line of pip says of the time before the first release."""
    return re.sub(r" +# before the first release, .*$", "", readme, flags=re.MULTILINE)


def git(*command):
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.1.0")
    parser.add_argument("--no-wheel", action="store_true", help="do not run the README's first screen from the wheel")
    asked = parser.parse_args()
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", asked.version):
        raise SystemExit(f"{asked.version} is no version such as 0.1.0 or 0.2.0rc1")
    if git("status", "--porcelain"):
        raise SystemExit("commit or remove what is changed first")
    if git("branch", "--show-current") != "main":
        raise SystemExit("releases are made on main")
    if git("tag", "--list", f"v{asked.version}"):
        raise SystemExit(f"there is a tag v{asked.version}")
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    changelog = released(CHANGELOG.read_text(encoding="utf-8"), asked.version, day)
    source = numbered(VERSION.read_text(encoding="utf-8"), asked.version)
    citation = cited(CITATION.read_text(encoding="utf-8"), asked.version, day)
    if not asked.no_wheel:
        subprocess.run([sys.executable, str(ROOT / "scripts" / "first_screen.py")], check=True)
    CHANGELOG.write_text(changelog, encoding="utf-8")
    VERSION.write_text(source, encoding="utf-8")
    CITATION.write_text(citation, encoding="utf-8")
    README.write_text(installed(README.read_text(encoding="utf-8")), encoding="utf-8")
    git("commit", "--all", "--message", f"Release {asked.version}")
    git("tag", "--annotate", f"v{asked.version}", "--message", f"Frostline {asked.version}")
    print(f"committed and tagged v{asked.version}; `git push --follow-tags` sends it")


if __name__ == "__main__":
    main()
