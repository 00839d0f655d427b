"""Tenants of nodes, with the tokens that they send."""

import hashlib

from frostline.core.config import TenantSettings


def tenant(name, **fields):
    return TenantSettings(name=name, token_sha256=hashlib.sha256(token_of(name).encode()).hexdigest(), **fields)


def token_of(name):
    return f"the-token-of-{name}"


def header(name):
    return {"Authorization": f"Bearer {token_of(name)}"}
