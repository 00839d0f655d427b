"""Symbolic links in a data root lead out of it only where the operator of the node allows it."""

import os

import pytest

from frostline.core.config import NodeSettings
from frostline.core.errors import AccessDenied
from frostline.node import Node
from frostline.stores.local import FolderStore, MmapFolder
from frostline.stores.open import open_store
from frostline.stores.protocols import LinkBounds, StoreLimits
from support.nodes import joined, jpeg, make_images, request, samples_of
from support.tenants import tenant, token_of

MEMORY = 96 << 20


@pytest.fixture
def places(tmp_path):
    """A root with a link to a file outside, one to a folder outside, and one that stays inside."""
    outside = make_images(tmp_path / "outside", 1)
    root = make_images(tmp_path / "root", 1)
    inside = make_images(root / "real", 1)
    (root / "hosts.jpg").symlink_to(outside / "0000.jpg")
    (root / "away").symlink_to(outside)
    (root / "here").symlink_to(inside)
    return root, outside


def bounded(*folders):
    return LinkBounds(tuple(map(str, folders)))


def asked(node, folder, account=None):
    """What a node answers to a request for all files that a folder shows, as its caller lists them."""
    admission = None if account is None else node.admit(0, account)
    return joined(node.features(request(folder, 0, samples=samples_of(folder)), admission))


def test_does_not_follow_links_out_of_a_root(places):
    root, outside = places
    (root / "0000.jpg").unlink()
    for name in ("here", "away", "real"):
        (root / name).rename(root.parent / f"_{name}")
    refused = pytest.raises(AccessDenied, match=r"hosts\.jpg .*leads out of the data root.*--follow-links")
    with Node(NodeSettings(memory_bytes=MEMORY), (root.as_uri(),)) as node, refused:
        asked(node, root)
    with Node(NodeSettings(memory_bytes=MEMORY, follow_links=True), (root.as_uri(),)) as node:
        assert asked(node, root)[2] == [(outside / "0000.jpg").read_bytes()]


def test_refuses_a_data_set_that_is_a_link_out_of_the_root(places):
    root, _ = places
    with Node(NodeSettings(memory_bytes=MEMORY), (root.as_uri(),)) as node:
        with pytest.raises(AccessDenied):
            asked(node, root / "away")
        assert asked(node, root / "here")[2] == [jpeg(0)]


def test_links_between_roots_are_followed_as_far_as_the_tenant_may_read(places):
    root, outside = places
    tenants = (tenant("both"), tenant("one", roots=(root.as_uri(),)))
    settings = NodeSettings(memory_bytes=MEMORY, tenants=tenants)
    with Node(settings, (root.as_uri(), outside.as_uri())) as node:
        assert asked(node, root / "away", node.identify(token_of("both")))[2] == [jpeg(0)]
        with pytest.raises(AccessDenied):
            asked(node, root / "away", node.identify(token_of("one")))


@pytest.mark.parametrize("name", ["hosts.jpg", "away/0000.jpg", "here/up.jpg"])
def test_a_bounded_folder_reads_and_describes_nothing_outside_itself(places, name):
    store = open_store(str(places[0]), StoreLimits(links=bounded(places[0])))
    (places[0] / "real" / "up.jpg").symlink_to("../../outside/0000.jpg")
    for use in (lambda: store.read(name, 0, 1), lambda: store.describe(name), lambda: list(store.list())):
        with pytest.raises(AccessDenied, match="symbolic link"):
            use()


def test_a_bounded_folder_lists_and_reads_links_that_stay_inside(places):
    root, _ = places
    (root / "hosts.jpg").unlink()
    (root / "away").unlink()
    store = open_store(str(root), StoreLimits(links=bounded(root)))
    names = {entry.object for entry in store.list()}
    assert names == {"0000.jpg", "real/0000.jpg", "here/0000.jpg"}
    for name in names:
        assert bytes(store.read(name, 0, 4)) == jpeg(0)[:4]
        assert store.describe(name).size == len(jpeg(0))


def test_sealed_files_are_mapped_only_where_links_may_lead(places):
    root, outside = places
    for path in (outside / "0000.jpg", root / "0000.jpg"):
        path.chmod(0o444)
    store = MmapFolder(FolderStore(str(root), bounded(root)))
    assert bytes(store.read("0000.jpg", 0, 4)) == jpeg(0)[:4]
    with pytest.raises(AccessDenied):
        store.read("hosts.jpg", 0, 4)


def test_a_root_that_is_a_link_may_be_pointed_elsewhere(places, tmp_path):
    root, outside = places
    current = tmp_path / "current"
    current.symlink_to(root)
    store = open_store(str(current), StoreLimits(links=bounded(current)))
    assert bytes(store.read("0000.jpg", 0, 4)) == jpeg(0)[:4]
    current.unlink()
    current.symlink_to(outside)
    assert bytes(store.read("0000.jpg", 0, 4)) == jpeg(0)[:4]


def test_a_link_that_changes_while_it_is_opened_reveals_nothing(places, monkeypatch):
    root, outside = places
    opened = os.open

    def turned(path, *rest):
        if str(path).endswith("/0000.jpg"):
            return opened(outside / "0000.jpg", *rest)
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", turned)
    with pytest.raises(AccessDenied):
        open_store(str(root), StoreLimits(links=bounded(root))).read("0000.jpg", 0, 1)
