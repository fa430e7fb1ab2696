"""What can go wrong with a pod's network."""

from __future__ import annotations


class NetworkError(Exception):
    """`could not <verb> <noun> 'id': <cause>; <what to do>`."""


class NftError(NetworkError):
    """nftables did not do what it was asked; the message has its own words."""
