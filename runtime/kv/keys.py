"""Keys of KV blocks: a hash that chains over everything that the bytes of a block depend on.

    root      artifact (digest of program and weights), KV layout with its order of keys, kernels and engine, format
              version
    scope     root, or root + cache salt + adapter, or random bytes for a sequence that shares nothing
    block     key of the block before it (the scope for the first) + its own tokens
    state     key of the block that it is the side state after (`state_content`)

So equal keys mean equal model, precision, kernels, engine, tenant and history back to token 0. A hit compares the
tokens too (`PrefixIndex`, `DiskStore`), so that even a collision cannot serve another prompt's block.
"""

import secrets
from hashlib import sha256
from typing import NamedTuple

_FORMAT_VERSION = 1  # of the keys; raise it when the meaning of a block's bytes changes
_KEY_BYTES = 32


class BlockContent(NamedTuple):
    """What a full block is for: its key `hash`, that of the block before it, its int64 tokens as bytes."""

    hash: bytes
    parent: bytes
    tokens: bytes


class Tree(NamedTuple):
    """All blocks whose chains start with the same block; `first` is its key."""

    first: bytes
    private: bool


class PrefixScope(NamedTuple):
    """First parent of a sequence's blocks; sequences share blocks if it is equal. A private one is one sequence's."""

    root: bytes
    private: bool = False


def root_hash(identity: str, layout: str, *, kernels: str = "") -> bytes:
    """Key from which all chains of one artifact, KV layout and set of kernels start.

    identity   the artifact's digest; the name of a model is not enough
    layout     digest of the KV geometry (`KVGeometry.format_digest`), dtype and order of keys included
    kernels    what the bits of keys and values depend on besides the artifact: libraries, the version and code of the
               engine that calls them (`code_version`), instruction set
    """
    return _digest("ingot kv", str(_FORMAT_VERSION), identity, layout, kernels)


def prefix_scope(root: bytes, *, cache_salt: str = "", adapter: str = "", shared: bool = True) -> PrefixScope:
    """The scope of a request. Those of another salt or adapter, and all that are not shared, have one of their own.

    adapter   digest of the weights that the request adds to the model's; empty for none
    """
    if not shared:
        return PrefixScope(secrets.token_bytes(_KEY_BYTES), private=True)
    if not cache_salt and not adapter:
        return PrefixScope(root)
    return PrefixScope(_digest(root.hex(), cache_salt, adapter))


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Key of a block: 32 bytes. The parent's length is fixed, so the two parts cannot be confused."""
    return sha256(parent + tokens).digest()


def state_content(block: bytes) -> BlockContent:
    """What the side state after a block is stored for: like a block that follows it and has no tokens.

    No block has this key, because each has tokens.
    """
    return BlockContent(block_hash(block, b""), block, b"")


def _digest(*parts: str) -> bytes:
    """SHA-256 over texts, each with its length, so that no two lists of texts give the same bytes."""
    digest = sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
